"""Linear layer with 4-bit weights and 16-bit activations, for the layouts of GPTQ and AWQ.

Weights are repacked once (packing.py). The kernel reads them at the bandwidth of the memory for few tokens (kernel.py). There is
no gradient.
"""

import torch
from torch import Tensor

from strata.kernels.ops.on_device import on_tensor_device
from strata.kernels.ops.w4a16_linear.kernel import CHUNK, WORDS, size_class, token_tile, tunable, w4a16_linear_triton
from strata.kernels.ops.w4a16_linear.packing import PackedWeight, pack, unpack
from strata.kernels.tuning.tunable import Config, TuningCase

DTYPES = (torch.bfloat16, torch.float16)
# Inputs and outputs for tuning, a shape of each size class.
WIDE = ((4096, 4096), (4096, 6144), (8192, 8192), (4096, 28672))
DEEP = ((8192, 2048), (14336, 2048), (14336, 4096), (28672, 8192))


def reference(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    weight = unpack(PackedWeight(packed, scales, zeros), x.shape[-1])
    out = x.to(torch.promote_types(x.dtype, torch.float32)) @ weight.T.to(torch.promote_types(x.dtype, torch.float32))
    return (out if bias is None else out + bias).to(x.dtype)


def tuning_cases(device: torch.device) -> list[TuningCase]:
    cases = []
    for inputs, outputs in WIDE + DEEP:
        weight = random_weight(inputs, outputs, 128, device)
        for tokens in (8, 16, 32, 64, 128):
            x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)

            def run(chosen: Config, x: Tensor = x, weight: PackedWeight = weight) -> None:
                w4a16_linear_triton(x, *weight, None, chosen.arguments())

            cases.append(TuningCase(tunable, (token_tile(tokens), *size_class(inputs, outputs)), run))
    return cases


def random_weight(
    inputs: int, outputs: int, group: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, symmetric: bool = True
) -> PackedWeight:
    """Random weights with outputs of about unit variance for unit inputs."""
    nibbles = torch.randint(0, 16, (inputs, outputs), device=device, dtype=torch.uint8)
    scales = (torch.rand(inputs // group, outputs, device=device) + 0.5) * inputs**-0.5 / 4.6
    zeros = None if symmetric else torch.randint(0, 16, scales.shape, device=device, dtype=torch.uint8)
    return pack(nibbles, scales.to(dtype), zeros)


def w4a16_linear_cpu(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
    weight = unpack(PackedWeight(packed, scales, zeros), x.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


library = torch.library.Library("strata", "FRAGMENT")
library.define("w4a16_linear(Tensor x, Tensor packed, Tensor scales, Tensor? zeros, Tensor? bias) -> Tensor")
library.impl("w4a16_linear", w4a16_linear_cpu, "CPU")
library.impl("w4a16_linear", on_tensor_device(w4a16_linear_triton), "CUDA")


@torch.library.register_fake("strata::w4a16_linear", lib=library)
def _(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[1])


def w4a16_linear(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x [..., inputs] times the transposed weight, plus bias [outputs]. `packed`, `scales` and `zeros` are those of a
    `PackedWeight`, from `pack_gptq`, `pack_awq` or `pack`. Sums are in fp32."""
    if packed.dim() != 3 or packed.shape[2] != WORDS or packed.dtype != torch.int16:
        raise ValueError(
            f"w4a16_linear expects packed weights [chunks, outputs, {WORDS}] in int16, from pack_gptq, pack_awq or pack, got "
            f"{list(packed.shape)} {packed.dtype}"
        )
    chunks, outputs, _ = packed.shape
    if not x.dim() or -(-x.shape[-1] // CHUNK) != chunks:
        raise ValueError(f"w4a16_linear expects x [..., inputs] of {chunks} chunks of {CHUNK} inputs, got {list(x.shape)}")
    if x.dtype not in DTYPES and (x.is_cuda or not x.is_floating_point()):
        raise ValueError(f"w4a16_linear expects bfloat16 or float16 activations (any float on a CPU), got {x.dtype}")
    if scales.dim() != 2 or scales.shape[1] != outputs or scales.shape[0] not in (chunks, 2 * chunks, 4 * chunks):
        raise ValueError(
            f"w4a16_linear expects scales [1, 2 or 4 per chunk, {outputs}] for {chunks} chunks, got {list(scales.shape)}"
        )
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != torch.uint8):
        raise ValueError(f"w4a16_linear expects uint8 zero points of the scales' shape, got {list(zeros.shape)} {zeros.dtype}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"w4a16_linear expects a bias of {outputs} outputs, got {list(bias.shape)}")
    if packed.numel() >= 2**31:
        raise ValueError(
            f"w4a16_linear supports fewer than 2**33 weights, got {packed.numel() * 4}: the kernel's offsets are 32 bits"
        )
    if not all(one is None or one.is_contiguous() for one in (packed, scales, zeros, bias)):
        raise ValueError("w4a16_linear expects contiguous weights, scales, zero points and bias")
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, scales, bias)):
        raise ValueError("w4a16_linear has no gradient, and an input requires one: call it under torch.no_grad()")
    return torch.ops.strata.w4a16_linear(x, packed, scales, zeros, bias)  # type: ignore[no-any-return]
