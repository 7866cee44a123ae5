"""RMS norms of CPU engines, by vLLM's C++ kernels.

vLLM has such kernels for CPUs, and computes norms there by eight of PyTorch's operators all the same, most of whose time is that
of being called. A step of a small model has little else to do.

Registered with vLLM's own interface for implementations of its operators. No longer needed when vLLM's `vllm_c` supports CPUs.
"""

import torch
from torch import Tensor
from vllm.ir.ops import fused_add_rms_norm, rms_norm
from vllm.platforms import current_platform

current_platform.import_kernels()

NAME = "strata_cpu"
BUILT = all(hasattr(torch.ops._C, name) for name in ("rms_norm", "fused_add_rms_norm"))
VECTOR = 32  # elements of the widest vectors that the kernels compute with; rows are whole multiples of it


def norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return (
        weight is not None
        and weight.dtype is x.dtype
        and variance_size is None
        and x.shape[-1] % VECTOR == 0
        and x.is_contiguous()
    )


def sum_fits(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return norm_fits(x, weight, epsilon, variance_size) and x_residual.dtype is x.dtype and x_residual.is_contiguous()


@rms_norm.register_impl(NAME, supported=BUILT, supports_args=norm_fits)  # type: ignore[untyped-decorator]
def norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    found = torch.empty_like(x)
    torch.ops._C.rms_norm(found, x, weight, epsilon)
    return found


@fused_add_rms_norm.register_impl(NAME, supported=BUILT, supports_args=sum_fits, inplace=True)  # type: ignore[untyped-decorator]
def sum_and_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def use() -> None:
    """Prefers these kernels in this process, unless the engine's `ir_op_priority` chooses others."""
    for operator in (rms_norm, fused_add_rms_norm):
        if operator.get_priority() == ["native"]:
            operator.set_default([NAME, "native"])
