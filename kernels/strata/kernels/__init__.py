"""Triton kernels as torch operators: the same call runs on a laptop's CPU and on Hopper GPUs, with autograd and torch.compile.

Public API: the operations below, and `patch`, which puts them into a Hugging Face model. Each loads on first use, since torch and
Triton take seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.kernels.graph.huggingface import patch
    from strata.kernels.ops.flash_attention.flash_attention import flash_attention
    from strata.kernels.ops.linear_cross_entropy.linear_cross_entropy import linear_cross_entropy
    from strata.kernels.ops.rms_norm.rms_norm import add_rms_norm, rms_norm
    from strata.kernels.ops.rope import rope
    from strata.kernels.ops.swiglu import swiglu

__all__ = ["add_rms_norm", "flash_attention", "linear_cross_entropy", "patch", "rms_norm", "rope", "swiglu"]

_MODULES = {
    "add_rms_norm": "ops.rms_norm.rms_norm",
    "flash_attention": "ops.flash_attention.flash_attention",
    "linear_cross_entropy": "ops.linear_cross_entropy.linear_cross_entropy",
    "patch": "graph.huggingface",
    "rms_norm": "ops.rms_norm.rms_norm",
    "rope": "ops.rope",
    "swiglu": "ops.swiglu",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"strata.kernels.{_MODULES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
