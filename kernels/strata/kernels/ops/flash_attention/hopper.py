"""Flash attention forward on Hopper: supported shapes, tile sizes and launch. The kernel is in hopper_kernel.py."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from strata.kernels.ops.flash_attention.hopper_kernel import forward_kernel
from strata.kernels.tuning.tunable import architecture

ROWS = 64  # queries per warpgroup: the M of one wgmma
PORTABLE_DIM = 32  # up to here the portable kernel multiplies half as much, since it pads a head to the next power of two
L2_BUDGET = 32 << 20  # bytes of keys and values in use concurrently, of Hopper's 50 MB of L2


@dataclass(frozen=True)
class Tiling:
    consumers: int  # computing warpgroups
    block: int  # keys per block
    stages: int  # stages of the shared-memory ring
    threads_registers: int  # registers per thread at launch, of 65536 per program, before the loading warps release theirs
    registers: int  # registers per computing thread
    loader_registers: int


# By width of a head in shared memory: a power of two, or the sum of two (`slices`). A narrower head is padded there: TMA fills
# with zeros past its end, at no memory traffic. Three warpgroups if the softmax costs as much as the products, two if the
# accumulators are large.
TILINGS = {
    64: Tiling(3, block=128, stages=2, threads_registers=128, registers=160, loader_registers=32),
    80: Tiling(2, block=128, stages=2, threads_registers=168, registers=240, loader_registers=24),
    96: Tiling(2, block=128, stages=2, threads_registers=168, registers=240, loader_registers=24),
    128: Tiling(2, block=128, stages=2, threads_registers=168, registers=240, loader_registers=24),
    160: Tiling(2, block=128, stages=2, threads_registers=168, registers=240, loader_registers=24),
    256: Tiling(2, block=64, stages=2, threads_registers=168, registers=240, loader_registers=24),
}

# Two warpgroups for narrow heads, too, where their smaller tiles leave less of the last wave of programs idle.
SMALLER = {64: Tiling(2, block=128, stages=2, threads_registers=168, registers=240, loader_registers=24)}
SMALLER_COST = 1.1  # of a row, relative to three warpgroups

# Layouts in shared memory by swizzled bytes: as many as a row of the slice has, up to 128.
_LAYOUTS = {bytes: gl.NVMMASharedLayout(swizzle_byte_width=bytes, element_bitwidth=16, rank=4) for bytes in (32, 64, 128)}
_compiled: dict[tuple[Any, ...], Any] = {}


def supports(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, cu_seqlens: Tensor | None) -> bool:
    """True if `forward` supports the call: Hopper, half precision, a head dimension that a tiling holds, and TMA-compatible
    strides."""
    return (
        architecture(q.device) == 90
        and q.dtype in (torch.bfloat16, torch.float16)
        and PORTABLE_DIM < q.shape[-1] <= max(TILINGS)
        and q.shape[-1] % 8 == 0  # 16 bytes, the width of a store
        and q.numel() > 0
        and k.numel() > 0
        and (window is None or causal)
        and (not causal or q.shape[1] <= k.shape[1])
        and all(_fits_tma(x) for x in (q, k, v))
    )


def _fits_tma(x: Tensor) -> bool:
    batch, tokens, heads, dim = x.stride()
    return dim == 1 and min(batch, tokens, heads) > 0 and not (batch | tokens | heads) & 7 and not x.data_ptr() & 15


def tiled_dim(dim: int) -> int:
    """Width of the narrowest tiling that holds a head."""
    return min(width for width in TILINGS if width >= dim)


def slices(width: int) -> tuple[int, int]:
    """Widths of a head's two slices in shared memory: the largest power of two, and what remains (0: one slice only)."""
    first = 1 << (width.bit_length() - 1)
    return first, width - first


def _tiling(width: int, causal: bool, tokens: int, heads: int, programs: int) -> Tiling:
    """The tiling whose waves of programs cost least. Tiles of causal attention differ in cost, and fill the last wave anyway."""
    usual, smaller = TILINGS[width], SMALLER.get(width)
    if smaller is None or causal:
        return usual

    def cost(tiling: Tiling) -> int:
        return -(-heads * -(-tokens // (tiling.consumers * ROWS)) // programs) * tiling.consumers

    return smaller if cost(smaller) * SMALLER_COST < cost(usual) else usual


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132  # an H100's


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    """The output [batch, tokens, heads, dim] and the log-sum-exp [batch, heads, tokens]. Requires that `supports`
    returns True, and a positive scale."""
    batch, tokens, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    width = tiled_dim(dim)
    first, tail = slices(width)
    out = torch.empty((batch, tokens, heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    sequences, longest, longest_keys = batch, tokens, keys
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
        longest = longest_keys = tokens if max_seqlen is None else max_seqlen
    group = heads // kv_heads
    programs = _processors(q.device)
    tiling = _tiling(width, causal, longest, sequences * heads, programs)
    tiles = -(-longest // (tiling.consumers * ROWS))
    total = tiles * sequences * heads
    heads_together = min(max(1, L2_BUDGET // (longest_keys * dim * 4)) * group, sequences * heads)
    # Programs that process several tiles of different cost take them from a counter.
    counted = total > programs and (causal or cu_seqlens is not None)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if counted else lse
    values = (
        _descriptor(q, ROWS, first), _descriptor(k, tiling.block, first), _descriptor(v, tiling.block, first),
        _descriptor(q, ROWS, tail), _descriptor(k, tiling.block, tail), _descriptor(v, tiling.block, tail),
        out, lse, lse if cu_seqlens is None else cu_seqlens, counter,
        tokens, keys, heads, group, total, sequences, heads_together, tiles, window or 0,
    )  # fmt: skip
    constants = (
        scale, causal, window is not None, cu_seqlens is not None, counted,
        tiling.consumers, tiling.block, dim, first, tail, tiling.stages, tiling.registers, tiling.loader_registers,
    )  # fmt: skip
    grid = (min(programs, total), 1, 1)
    key = (q.device, q.dtype, *constants)
    kernel = _compiled.get(key)
    if kernel is None:
        _compiled[key] = forward_kernel[grid](*values, *constants, num_warps=4, maxnreg=tiling.threads_registers)
    else:
        kernel[grid](*values, *constants)
    return out, lse


class _Descriptor(TensorDescriptor):  # type: ignore[misc]
    def __post_init__(self) -> None:
        """Skips the parent's checks, which take longer than the rest of a launch. `supports` has checked the same."""


def _descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor | None:
    """Descriptor of blocks of a slice of one head: dimensions [batch, heads, tokens, dim], so that TMA fills with zeros past the
    end. None for an empty slice."""
    if not width:
        return None
    batch, tokens, heads, dim = x.shape
    strides = x.stride()
    layout = _LAYOUTS[min(2 * width, 128)]
    return _Descriptor(x, [batch, heads, tokens, dim], [strides[0], strides[2], strides[1], 1], [1, 1, rows, width], layout)
