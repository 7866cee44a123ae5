"""Root-mean-square norm, alone or fused with a residual addition, in one pass over memory.

As in Hugging Face's Llama, statistics are in fp32 for every dtype, and normalised values are rounded to the input dtype before
they are multiplied by the weight. The weight may be fp32 in a bf16 model. The backward pass is in backward.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata.kernels.ops.on_device import on_tensor_device
from strata.kernels.ops.rms_norm.backward import as_rows, cdiv
from strata.kernels.tuning.tunable import Config, Key, Tunable, TuningCase, bucket, config

LARGEST_WIDTH = 65536
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    rows,
    x_stride,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Reads a row twice; the first read keeps it in the cache for the second. Faster than holding it in registers, which lowers
    occupancy and with it the number of loads in flight."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    squares = tl.zeros([BLOCK_ROWS, CHUNK], tl.float32)
    for start in tl.range(0, WIDTH, CHUNK):
        column = start + tl.arange(0, CHUNK)[None, :]
        inside = (row < rows) & (column < WIDTH)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / WIDTH + EPS)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    for start in tl.range(0, WIDTH, CHUNK):
        column = start + tl.arange(0, CHUNK)[None, :]
        inside = (row < rows) & (column < WIDTH)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0, eviction_policy="evict_first")
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0, eviction_policy="evict_last")
        normal = (x.to(tl.float32) * rstd).to(x.dtype).to(tl.float32)
        tl.store(y_ptr + row * WIDTH + column, normal * weight.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    rows,
    x_stride,
    residual_stride,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = (row < rows) & (column < WIDTH)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * WIDTH + column, total, mask=inside)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    wide = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / WIDTH + EPS)
    normal = (wide * rstd).to(x.dtype).to(tl.float32)
    tl.store(y_ptr + row * WIDTH + column, normal * weight.to(tl.float32), mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


def _candidates(arch: int, key: Key) -> Sequence[Config]:
    """Eight bf16 values per thread are one 128-bit load."""
    width = int(key[0])
    chunks = [min(chunk, width) for chunk in ((4096, 2048, 1024) if width > 4096 else (2048, 1024, 4096))]
    found = [config(max(chunk // 256, 1), CHUNK=chunk, BLOCK_ROWS=max(1024 // width, 1)) for chunk in dict.fromkeys(chunks)]
    return [*found, config(16, CHUNK=8192, BLOCK_ROWS=1)] if width >= 8192 else found


def _add_candidates(arch: int, key: Key) -> Sequence[Config]:
    width = int(key[0])
    values = (1024, 512, 256) if width <= 4096 else (512, 1024, 256)  # values per warp
    warps = dict.fromkeys(min(max(width // count, 1), 32) for count in values)
    return [config(count, BLOCK_ROWS=max(1024 // width, 1)) for count in warps]


tunable = Tunable("rms_norm", _candidates)
add_tunable = Tunable("add_rms_norm", _add_candidates)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, chosen: dict[str, int] | None = None) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    width, rows = x.shape[-1], rstd.numel()
    if rows:
        x, x_stride = as_rows(x)
        chosen = chosen or tunable.arguments((bucket(width), x.element_size()), x.device)
        rms_norm_kernel[(cdiv(rows, chosen["BLOCK_ROWS"]),)](
            x, weight.contiguous(), y, rstd, rows, x_stride, EPS=eps, WIDTH=width, **chosen
        )
    return y, rstd


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, chosen: dict[str, int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(y)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    width, rows = x.shape[-1], rstd.numel()
    if rows:
        x, x_stride = as_rows(x)
        residual, residual_stride = as_rows(residual)
        block_width = bucket(width)
        chosen = chosen or add_tunable.arguments((block_width, x.element_size()), x.device)
        add_rms_norm_kernel[(cdiv(rows, chosen["BLOCK_ROWS"]),)](
            x, residual, weight.contiguous(), y, total, rstd, rows, x_stride, residual_stride,
            EPS=eps, WIDTH=width, BLOCK_WIDTH=block_width, **chosen,
        )  # fmt: skip
    return y, total, rstd


def tuning_cases(device: torch.device) -> list[TuningCase]:
    return [case for width in (1024, 2048, 4096, 8192, 16384) for case in _tuning_cases(width, device)]


def _tuning_cases(width: int, device: torch.device) -> list[TuningCase]:
    x, residual = (torch.randn(2**26 // width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(width, device=device, dtype=torch.bfloat16)
    key = (width, x.element_size())

    def alone(chosen: Config) -> None:
        rms_norm_triton(x, weight, 1e-6, chosen.arguments())

    def after_adding(chosen: Config) -> None:
        add_rms_norm_triton(x, residual, weight, 1e-6, chosen.arguments())

    return [TuningCase(tunable, key, alone), TuningCase(add_tunable, key, after_adding)]


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    wide = x.to(_statistics_dtype(x)).contiguous()
    rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
    normal = (wide * rstd).to(x.dtype)
    y = normal.mul_(weight) if weight.dtype == x.dtype else (normal * weight).to(x.dtype)
    return y, rstd.squeeze(-1)


def add_rms_norm_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = (x + residual).contiguous()
    y, rstd = rms_norm_cpu(total, weight, eps)
    return y, total, rstd


library = torch.library.Library("strata", "FRAGMENT")
library.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
library.define("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)")
library.impl("rms_norm", rms_norm_cpu, "CPU")
library.impl("rms_norm", on_tensor_device(rms_norm_triton), "CUDA")
library.impl("add_rms_norm", add_rms_norm_cpu, "CPU")
library.impl("add_rms_norm", on_tensor_device(add_rms_norm_triton), "CUDA")


@torch.library.register_fake("strata::rms_norm", lib=library)
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=_statistics_dtype(x))


@torch.library.register_fake("strata::add_rms_norm", lib=library)
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=_statistics_dtype(x))


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    rstd = output[1]
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, weight, rstd)


def _gradients(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor, Tensor, None]:
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = torch.ops.strata.rms_norm_backward(dy, None, x, weight, rstd)
    return dx, dweight, None


def _setup_add_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, total, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)  # if nothing else reads the sum, it has no gradient of its own
    ctx.save_for_backward(total, inputs[2], rstd)


def _gradients_of_sum(
    ctx: Any, dy: Tensor | None, dsum: Tensor | None, _: None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    if dy is None:
        return dsum, dsum, None, None
    total, weight, rstd = ctx.saved_tensors
    dx, dweight = torch.ops.strata.rms_norm_backward(dy, dsum, total, weight, rstd)
    return dx, dx, dweight, None


torch.library.register_autograd("strata::rms_norm", _gradients, setup_context=_setup_context, lib=library)
torch.library.register_autograd("strata::add_rms_norm", _gradients_of_sum, setup_context=_setup_add_context, lib=library)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width] divided by its root mean square along the last dimension, times weight [width]; in x's dtype."""
    _check(x, weight)
    y, _ = torch.ops.strata.rms_norm(x, weight, eps)
    return y  # type: ignore[no-any-return]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the norm of x + residual, and the sum. The norm is of the rounded sum, which continues the residual stream."""
    _check(x, weight)
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"add_rms_norm expects tensors of one shape and dtype, got {list(x.shape)} {x.dtype} and "
            f"{list(residual.shape)} {residual.dtype}"
        )
    y, total, _ = torch.ops.strata.add_rms_norm(x, residual, weight, eps)
    return y, total


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype not in DTYPES and not (x.dtype == torch.float64 and x.device.type == "cpu"):
        raise ValueError(f"rms_norm expects float32, float16 or bfloat16 (float64 on a CPU), got {x.dtype}")
    if weight.shape != x.shape[-1:] or not weight.dtype.is_floating_point:
        raise ValueError(
            f"rms_norm of {list(x.shape)} expects a floating-point weight of {list(x.shape[-1:])}, "
            f"got {weight.dtype} {list(weight.shape)}"
        )
    if x.shape[-1] > LARGEST_WIDTH:
        raise ValueError(f"rms_norm expects rows of up to {LARGEST_WIDTH} values, got {x.shape[-1]}")
