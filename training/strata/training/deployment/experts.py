"""Forms of transformers' mixtures of experts that can be traced and converted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Sorts the tokens by expert, and multiplies each expert's tokens by its weights: for ONNX.
GROUPED = "grouped_mm"
# Copies the weights of each token's experts: for AOTInductor, which has no grouped product in float32 on the CPU. Reads only
# the chosen experts in a decoding step; a long prompt needs much memory.
COPIED = "batched_mm"


@contextmanager
def traceable(model: Any, implementation: str) -> Iterator[None]:
    """Changes transformers' implementation of the experts. A model without experts has "eager" and allows no other."""
    before = model.get_experts_implementation()[""]
    if before == "eager":
        yield
        return
    model.set_experts_implementation(implementation)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def grouped_product(rows: Any, weights: Any, ends: Any, bias: Any = None, out_dtype: Any = None) -> Any:
    """ONNX nodes of a grouped product: one product for each expert, over its own rows. `ends` has the end of each group."""
    from onnxscript import opset18 as op

    assert bias is None and out_dtype is None
    ends = op.Cast(ends, to=7)  # int64
    first = op.Constant(value_ints=[0])
    begin, outputs = first, []
    for expert in range(weights.shape[0]):
        this, following = op.Constant(value_ints=[expert]), op.Constant(value_ints=[expert + 1])
        end = op.Slice(ends, this, following, first)
        weight = op.Squeeze(op.Slice(weights, this, following, first), first)
        outputs.append(op.MatMul(op.Slice(rows, begin, end, first), weight))
        begin = end
    return op.Concat(*outputs, axis=0)


def onnx_translations() -> dict[Any, Any]:
    """Operations of `GROUPED` that torch.onnx does not know."""
    grouped = (torch.ops.transformers.grouped_mm_fallback.default, torch.ops.aten._grouped_mm.default)
    return dict.fromkeys(grouped, grouped_product)
