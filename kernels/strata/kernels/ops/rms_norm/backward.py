"""Backward pass of rms_norm: one read of x and dy, one write of dx.

The weight gradient is a sum over all rows. A few programs per SM each loop over many rows, prefetch the next rows into shared
memory, and accumulate a partial sum in fp32 registers. A second, small kernel adds the partial sums in a fixed order, so results
are bitwise reproducible.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata.kernels.ops.on_device import on_tensor_device
from strata.kernels.tuning.tunable import Config, Key, Tunable, TuningCase, bucket, config


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward_kernel(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    dy_stride,
    dsum_stride,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PREFETCH: tl.constexpr,
    RELOAD: tl.constexpr,
    HAS_DSUM: tl.constexpr,
):
    """With RELOAD, a row is read again from the cache after the reduction instead of being held in registers: wide rows would
    spill."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    for block in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=PREFETCH):
        row = (block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]).to(tl.int64)
        inside = (row < rows) & (column < WIDTH)
        x_row, dy_row = x_ptr + row * x_stride + column, dy_ptr + row * dy_stride + column
        x = tl.load(x_row, mask=inside, other=0.0, eviction_policy="evict_last" if RELOAD else "").to(tl.float32)
        dy = tl.load(dy_row, mask=inside, other=0.0, eviction_policy="evict_last" if RELOAD else "").to(tl.float32)
        if RELOAD:
            weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0, eviction_policy="evict_last")
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        along_x = tl.sum(x * (dy * weight.to(tl.float32)), 1, keep_dims=True) * (rstd / WIDTH)
        if RELOAD:
            x = tl.load(x_row, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dy = tl.load(dy_row, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
        normal = x * rstd
        dx = (dy * weight.to(tl.float32) - normal * along_x) * rstd
        if HAS_DSUM:
            dx += tl.load(dsum_ptr + row * dsum_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * WIDTH + column, dx, mask=inside)
        dweight += dy * normal
    partial = tl.sum(dweight, 0, keep_dims=True)
    tl.store(partial_ptr + program * WIDTH + column, partial, mask=column < WIDTH)


@triton.jit(do_not_specialize=["programs"])
def sum_partials_kernel(
    partial_ptr, dweight_ptr, programs, WIDTH: tl.constexpr, BLOCK_PROGRAMS: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    column = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
    total = tl.zeros([BLOCK_PROGRAMS, BLOCK_WIDTH], tl.float32)
    for first in range(0, programs, BLOCK_PROGRAMS):
        program = first + tl.arange(0, BLOCK_PROGRAMS)[:, None]
        inside = (program < programs) & (column < WIDTH)
        total += tl.load(partial_ptr + program * WIDTH + column, mask=inside, other=0.0)
    tl.store(dweight_ptr + column, tl.sum(total, 0, keep_dims=True), mask=column < WIDTH)


def _candidates(arch: int, key: Key) -> Sequence[Config]:
    """With three stages, two blocks of rows load while a third is processed, if shared memory is large enough."""
    width, size, inputs = int(key[0]), int(key[1]), 3 if key[2] else 2
    budget = (96 if arch in (86, 89, 120) else 160) * 1024
    tiles = [(16384, 8, 1), (16384, 16, 1), (8192, 8, 2)] if width > 2048 else [(8192, 4, 2), (4096, 4, 3), (16384, 8, 1)]
    pipelined = [
        config(warps, BLOCK_ROWS=max(tile // (width * size), 1), PREFETCH=3, RELOAD=0, PROGRAMS_PER_SM=programs)
        for tile, warps, programs in tiles
        if 2 * inputs * max(tile, width * size) <= budget
    ]
    reloading = [config(warps, BLOCK_ROWS=1, PREFETCH=1, RELOAD=1, PROGRAMS_PER_SM=1) for warps in (32, 16)]
    return pipelined if pipelined and width <= 8192 else reloading


tunable = Tunable("rms_norm_backward", _candidates)


def rms_norm_backward_triton(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, chosen: dict[str, int] | None = None
) -> tuple[Tensor, Tensor]:
    """dx and dweight. `dsum` is another gradient of x, added to dx in the same pass."""
    width = x.shape[-1]
    rows = rstd.numel()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if not rows:
        return dx, dweight.zero_()
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    dsum_rows, dsum_stride = (dy, 0) if dsum is None else as_rows(dsum)
    block_width = bucket(width)
    chosen = chosen or tunable.arguments((block_width, x.element_size(), dsum is not None), x.device)
    programs = min(cdiv(rows, chosen["BLOCK_ROWS"]), chosen["PROGRAMS_PER_SM"] * _multiprocessors(x.device))
    partial = x.new_empty((programs, width), dtype=torch.float32)
    rms_norm_backward_kernel[(programs,)](
        dy, dsum_rows, x, weight.contiguous(), rstd, dx, partial, rows, dy_stride, dsum_stride, x_stride,
        WIDTH=width, BLOCK_WIDTH=block_width, BLOCK_ROWS=chosen["BLOCK_ROWS"], PREFETCH=chosen["PREFETCH"],
        RELOAD=chosen["RELOAD"], HAS_DSUM=dsum is not None, num_warps=chosen["num_warps"],
    )  # fmt: skip
    sum_partials_kernel[(cdiv(width, 16),)](partial, dweight, programs, WIDTH=width, BLOCK_PROGRAMS=64, BLOCK_WIDTH=16)
    return dx, dweight


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """A view with contiguous rows, and its row stride. Copies only if no such view exists."""
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def cdiv(a: int, b: int) -> int:
    """Ceiling division. `triton.cdiv` also works inside kernels, and costs microseconds per launch."""
    return -(-a // b)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tuning_cases(device: torch.device) -> list[TuningCase]:
    return [_tuning_case(width, with_dsum, device) for width in (1024, 2048, 4096, 8192, 16384) for with_dsum in (False, True)]


def _tuning_case(width: int, with_dsum: bool, device: torch.device) -> TuningCase:
    x, dy = (torch.randn(2**26 // width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight, rstd = torch.randn(width, device=device, dtype=torch.bfloat16), torch.rand(2**26 // width, device=device)

    def run(chosen: Config) -> None:
        rms_norm_backward_triton(dy, dy if with_dsum else None, x, weight, rstd, chosen.arguments())

    return TuningCase(tunable, (width, x.element_size(), with_dsum), run)


def rms_norm_backward_cpu(dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Both reductions are matrix-vector products over the same product x * dy, computed by BLAS."""
    width = x.shape[-1]
    wide_x, wide_dy = (tensor.to(rstd.dtype).contiguous().view(-1, width) for tensor in (x, dy))
    wide_weight = weight.to(rstd.dtype)
    rstd = rstd.reshape(-1)
    product = wide_x * wide_dy
    dweight = rstd @ product
    along_x = (product @ wide_weight).mul_(rstd.pow(3)).div_(width)
    dx = torch.mul(wide_dy, wide_weight, out=product).mul_(rstd[:, None]).addcmul_(wide_x, along_x[:, None], value=-1)
    if dsum is not None:
        dx += dsum.reshape(-1, width)
    return dx.to(x.dtype).view(x.shape), dweight.to(weight.dtype)


library = torch.library.Library("strata", "FRAGMENT")
library.define("rms_norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)")
library.impl("rms_norm_backward", rms_norm_backward_cpu, "CPU")
library.impl("rms_norm_backward", on_tensor_device(rms_norm_backward_triton), "CUDA")


@torch.library.register_fake("strata::rms_norm_backward", lib=library)
def _(dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)
