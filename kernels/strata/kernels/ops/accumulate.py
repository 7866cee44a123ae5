"""total += values in place, for values in a narrower format than the total: bf16 gradients summed in fp32.

torch converts the values in a pass of its own, or reads them one by one within the addition. Here one pass reads both in wide
loads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata.kernels.ops.on_device import on_tensor_device

BLOCK = 4096
WARPS = 8


def reference(total: Tensor, values: Tensor) -> Tensor:
    return total + values.to(total.dtype)


@triton.jit
def accumulate_kernel(total_ptr, values_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    values = tl.load(values_ptr + places, mask=inside, cache_modifier=".cg").to(total_ptr.dtype.element_ty)
    total = tl.load(total_ptr + places, mask=inside, cache_modifier=".cg")
    tl.store(total_ptr + places, total + values, mask=inside, cache_modifier=".cs")


def accumulate_triton(total: Tensor, values: Tensor) -> None:
    size = total.numel()
    if size:
        accumulate_kernel[(-(-size // BLOCK),)](total, values.contiguous(), size, BLOCK=BLOCK, num_warps=WARPS)


def accumulate_cpu(total: Tensor, values: Tensor) -> None:
    total.view(-1).add_(values.reshape(-1))


library = torch.library.Library("strata", "FRAGMENT")
library.define("accumulate(Tensor(a!) total, Tensor values) -> ()")
library.impl("accumulate", accumulate_cpu, "CPU")
library.impl("accumulate", on_tensor_device(accumulate_triton), "CUDA")


@torch.library.register_fake("strata::accumulate", lib=library)
def _(total: Tensor, values: Tensor) -> None:
    """Returns nothing."""


def accumulate(total: Tensor, values: Tensor) -> None:
    """Adds `values` to the contiguous `total` of as many elements, in the total's format. Their shapes may differ."""
    if total.numel() != values.numel() or not total.is_contiguous():
        raise ValueError(
            f"accumulate expects a contiguous total of as many elements as the values, got {list(total.shape)} with strides "
            f"{list(total.stride())} and {list(values.shape)}"
        )
    torch.ops.strata.accumulate(total, values)
