"""silu(gate) * up, forward and backward. The backward pass saves only gate and up and recomputes the rest."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata.kernels.ops.on_device import on_tensor_device
from strata.kernels.tuning.tunable import Config, Key, Tunable, TuningCase, config

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def reference(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


@triton.jit
def _place(width, BLOCK: tl.constexpr):
    """The program's row, its first column, column offsets and their mask. Offsets are relative to the first column to stay in 32
    bits; a row can be a whole tensor, where absolute offsets need 64."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    column = tl.arange(0, BLOCK)
    return row, first, column, column < tl.minimum(width - first, BLOCK).to(tl.int32)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    row, first, column, inside = _place(width, BLOCK)
    gate = tl.load(gate_ptr + (row * gate_stride + first) + column, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + (row * up_stride + first) + column, mask=inside).to(tl.float32)
    # Bypass the cache: at training sizes the output is evicted before the next kernel reads it.
    tl.store(out_ptr + (row * width + first) + column, gate * tl.sigmoid(gate) * up, mask=inside, cache_modifier=".cs")


@triton.jit
def swiglu_backward_kernel(
    dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, width, dout_stride, gate_stride, up_stride, BLOCK: tl.constexpr
):
    row, first, column, inside = _place(width, BLOCK)
    dout = tl.load(dout_ptr + (row * dout_stride + first) + column, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptr + (row * gate_stride + first) + column, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + (row * up_stride + first) + column, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(dup_ptr + (row * width + first) + column, dout * silu, mask=inside)
    tl.store(dgate_ptr + (row * width + first) + column, dout * up * (sigmoid + silu * (1 - sigmoid)), mask=inside)


def _candidates(arch: int, key: Key) -> Sequence[Config]:
    return [config(4, BLOCK=1024), config(8, BLOCK=2048), config(4, BLOCK=2048), config(2, BLOCK=512)]


forward_tunable = Tunable("swiglu", _candidates)
backward_tunable = Tunable("swiglu_backward", _candidates)


def swiglu_triton(gate: Tensor, up: Tensor, chosen: dict[str, int] | None = None) -> Tensor:
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if out.numel():
        views, strides, rows, width = _rows(gate, up)
        chosen = chosen or forward_tunable.arguments((gate.element_size(),), gate.device)
        swiglu_kernel[_grid(rows, width, chosen)](*views, out, width, *strides, **chosen)
    return out


def swiglu_backward_triton(dout: Tensor, gate: Tensor, up: Tensor, chosen: dict[str, int] | None = None) -> tuple[Tensor, Tensor]:
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dup = torch.empty_like(dgate)
    if dgate.numel():
        views, strides, rows, width = _rows(dout, gate, up)
        chosen = chosen or backward_tunable.arguments((gate.element_size(),), gate.device)
        swiglu_backward_kernel[_grid(rows, width, chosen)](*views, dgate, dup, width, *strides, **chosen)
    return dgate, dup


def _rows(*tensors: Tensor) -> tuple[Sequence[Tensor], list[int], int, int]:
    """Views with contiguous rows, their row strides, the number of rows and the width. Contiguous tensors become one long row;
    a tensor is copied only if no view of it has contiguous rows."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return tensors, [0] * len(tensors), 1, tensors[0].numel()
    width = tensors[0].shape[-1]
    views = [tensor.reshape(-1, width) for tensor in tensors]
    views = [view if view.stride(1) == 1 else view.contiguous() for view in views]
    return views, [view.stride(0) for view in views], views[0].shape[0], width


def _grid(rows: int, width: int, chosen: dict[str, int]) -> tuple[int]:
    """Grid size. `triton.cdiv` also works inside kernels, and costs microseconds per launch."""
    return (-(-width // chosen["BLOCK"]) * rows,)


def tuning_cases(device: torch.device) -> list[TuningCase]:
    gate, up, dout = (torch.randn(16384, 4096, device=device, dtype=torch.bfloat16) for _ in range(3))
    key = (gate.element_size(),)

    def forward(chosen: Config) -> None:
        swiglu_triton(gate, up, chosen.arguments())

    def backward(chosen: Config) -> None:
        swiglu_backward_triton(dout, gate, up, chosen.arguments())

    return [TuningCase(forward_tunable, key, forward), TuningCase(backward_tunable, key, backward)]


def swiglu_cpu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(_wide(gate)).mul_(up).to(gate.dtype)


def swiglu_backward_cpu(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide, wide_dout = _wide(gate), _wide(dout)
    dup = torch.nn.functional.silu(wide)
    dgate = wide_dout * up
    torch.ops.aten.silu_backward.grad_input(dgate, wide, grad_input=dgate)
    return dgate.to(gate.dtype), dup.mul_(wide_dout).to(up.dtype)


def _wide(x: Tensor) -> Tensor:
    """Contiguous (so that results are), in fp32 or wider."""
    return (x if x.dtype in (torch.float32, torch.float64) else x.float()).contiguous()


library = torch.library.Library("strata", "FRAGMENT")
library.define("swiglu(Tensor gate, Tensor up) -> Tensor")
library.define("swiglu_backward(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)")
library.impl("swiglu", swiglu_cpu, "CPU")
library.impl("swiglu", on_tensor_device(swiglu_triton), "CUDA")
library.impl("swiglu_backward", swiglu_backward_cpu, "CPU")
library.impl("swiglu_backward", on_tensor_device(swiglu_backward_triton), "CUDA")


@torch.library.register_fake("strata::swiglu", lib=library)
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.register_fake("strata::swiglu_backward", lib=library)
def _(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    return torch.ops.strata.swiglu_backward(dout, gate, up)  # type: ignore[no-any-return]


torch.library.register_autograd("strata::swiglu", _gradients, setup_context=_setup_context, lib=library)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for gate and up [..., width], which may be the two halves of one packed tensor."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu expects gate and up of one shape and dtype, got {list(gate.shape)} {gate.dtype} and "
            f"{list(up.shape)} {up.dtype}"
        )
    if gate.dtype not in DTYPES and not (gate.dtype == torch.float64 and gate.device.type == "cpu"):
        raise ValueError(f"swiglu expects float32, float16 or bfloat16 (float64 on a CPU), got {gate.dtype}")
    return torch.ops.strata.swiglu(gate, up)  # type: ignore[no-any-return]
