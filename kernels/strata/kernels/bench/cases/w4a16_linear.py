"""w4a16_linear of one to 256 tokens against cuBLAS with bf16 weights, vLLM's Marlin and torch's int4 kernel."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.bench.case import OURS, Bar, Case, Contest, Missing
from strata.kernels.ops.w4a16_linear.packing import pack, unpack
from strata.kernels.ops.w4a16_linear.w4a16_linear import reference, w4a16_linear

TOLERANCE = 1e-2  # bf16
GROUP = 128
BARS = (Bar(2.5, "cuBLAS bf16"), Bar(1.0, "vLLM Marlin"))


def cases() -> list[Case]:
    few = [_case(tokens, 8192, 8192, BARS) for tokens in (1, 2, 4, 8, 16)]
    layers = [_case(tokens, *shape, ()) for shape in ((4096, 28672), (14336, 4096)) for tokens in (1, 16)]
    return few + layers + [_case(tokens, 8192, 8192, ()) for tokens in (32, 64, 256)]


def _case(tokens: int, inputs: int, outputs: int, bars: tuple[Bar, ...]) -> Case:
    name = f"{tokens} token{'s' if tokens > 1 else ''}, {inputs} x {outputs}"
    return Case("w4a16_linear", name, partial(_contest, tokens, inputs, outputs), bars)


def _contest(tokens: int, inputs: int, outputs: int, device: torch.device) -> Contest:
    nibbles = torch.randint(0, 16, (inputs, outputs), device=device, dtype=torch.uint8)
    scales = ((torch.rand(inputs // GROUP, outputs, device=device) + 0.5) * inputs**-0.5 / 4.6).bfloat16()
    weight = pack(nibbles, scales)
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    wide = unpack(weight, inputs).bfloat16()
    return Contest(
        contenders={
            OURS: partial(w4a16_linear, x, *weight),
            "cuBLAS bf16": partial(F.linear, x, wide),
            "vLLM Marlin": _marlin(x, nibbles, scales),
            "torch int4": _torch_int4(x, nibbles, scales),
        },
        reference=partial(reference, x.float(), *weight),
        tolerance=TOLERANCE,
        bytes=weight.packed.nbytes + scales.nbytes + x.nbytes + 2 * tokens * outputs,
        flops=2 * tokens * inputs * outputs,
    )


def _marlin(x: Tensor, nibbles: Tensor, scales: Tensor) -> Callable[[], Tensor] | Missing:
    try:
        from vllm import _custom_ops
        from vllm.model_executor.layers.quantization.utils import marlin_utils
        from vllm.scalar_type import scalar_types
    except ImportError as error:
        return Missing(str(error))
    if x.device.type != "cuda":
        return Missing("Marlin needs a GPU")
    inputs, outputs = nibbles.shape
    empty = marlin_utils.marlin_make_empty_g_idx(x.device)
    qweight = _words(nibbles.view(inputs // 8, 8, outputs), 1)
    return partial(
        marlin_utils.apply_gptq_marlin_linear,
        x,
        _custom_ops.gptq_marlin_repack(qweight, empty, inputs, outputs, 4),
        marlin_utils.marlin_permute_scales(scales, inputs, outputs, GROUP),
        empty,
        empty,
        empty,
        marlin_utils.marlin_make_workspace_new(x.device),
        scalar_types.uint4b8,
        outputs,
        inputs,
        is_k_full=True,
    )


def _words(nibbles: Tensor, dim: int) -> Tensor:
    """int32 words of eight nibbles along `dim`, lowest bits first."""
    words = torch.zeros_like(nibbles.select(dim, 0), dtype=torch.int32)
    for place in range(8):
        words |= nibbles.select(dim, place).to(torch.int32) << (4 * place)
    return words


def _torch_int4(x: Tensor, nibbles: Tensor, scales: Tensor) -> Callable[[], Tensor] | Missing:
    """torch's tinygemm, of (nibble - 8) * scale + zero with zeros of 0."""
    if x.device.type != "cuda":
        return Missing("its layout is that of a GPU")
    by_output = nibbles.T
    packed = torch.ops.aten._convert_weight_to_int4pack((by_output[:, ::2] << 4 | by_output[:, 1::2]).contiguous(), 8)
    scales_and_zeros = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()
    return partial(torch.ops.aten._weight_int4pack_mm, x, packed, GROUP, scales_and_zeros)
