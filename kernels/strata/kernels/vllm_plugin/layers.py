"""Strata kernels behind vLLM's RMSNorm, SiluAndMul and RotaryEmbedding.

RMSNorm is an operator of vLLM's intermediate representation, lowered at compilation to the implementation the engine prefers. The
other two are layers whose class a plugin may replace. vLLM still decides (`custom_ops`) whether a layer runs its kernel or its
plain torch code, which Inductor can fuse.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor
from vllm import ir
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from strata.kernels.ops.rms_norm.rms_norm import add_rms_norm, rms_norm
from strata.kernels.ops.rope import rope_
from strata.kernels.ops.swiglu import swiglu
from strata.kernels.vllm_plugin.switch import PROVIDER


def register(parts: Collection[str]) -> None:
    if "rms_norm" in parts and PROVIDER not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_norms)(_rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_adds_and_norms)(_fused_add_rms_norm)
    if "silu_and_mul" in parts:
        _replace(SiluAndMul, StrataSiluAndMul)
    if "rotary_embedding" in parts:
        _replace(RotaryEmbedding, StrataRotaryEmbedding)


def _replace(theirs: type[CustomOp], ours: type[CustomOp]) -> None:
    if theirs.__name__ not in op_registry_oot:
        CustomOp.register_oot(ours, name=theirs.__name__)
        ours.name = theirs.name  # the name used in `custom_ops`


# vLLM requires the same signatures as its own, including parameter names.
def _norms(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return weight is not None and weight.dtype == x.dtype and variance_size is None


def _adds_and_norms(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return x_residual.dtype == x.dtype and _norms(x, weight, epsilon, variance_size)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    assert weight is not None
    return rms_norm(x, weight, epsilon)


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    assert weight is not None
    return add_rms_norm(x, x_residual, weight, epsilon)


class StrataSiluAndMul(SiluAndMul):  # type: ignore[misc]
    def forward_cuda(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return swiglu(gate, up)


class StrataRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]
    """Builds its tables from vLLM's cache, rounded to the model's dtype, so that rotations equal those of vLLM's kernel."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.enabled() and hasattr(self, "cos_sin_cache"):
            cos, sin = self.cos_sin_cache.float().chunk(2, dim=-1)
            self.register_buffer("cos", cos.contiguous(), persistent=False)
            self.register_buffer("sin", sin.contiguous(), persistent=False)

    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if key is None:  # the layer shares the keys of another layer
            rotated: tuple[Tensor, Tensor | None] = super().forward_cuda(positions, query, key)
            return rotated
        positions = positions.flatten()
        heads, kv_heads = (states.view(positions.shape[0], -1, self.head_size) for states in (query, key))
        rope_(heads, kv_heads, self.cos, self.sin, positions=positions, interleaved=not self.is_neox_style)
        return query, key
