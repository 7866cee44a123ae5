"""Warp specialisation in Gluon: one warp copies, two warpgroups multiply, and barriers in shared memory connect them.

Idea: copies and products no longer share an instruction stream. The loading warp fills a ring of four stages and runs ahead, also
into the next tile, while the warpgroups store the last one. It releases its registers to the warpgroups, each of which
accumulates 64 x 256 elements. A warpgroup frees a stage when the next product has been issued, so that two are always in flight.
Bound: the tensor cores, and the power limit that sets their clock. Both warpgroups store at the same time, when no product runs.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from strata.kernels.ladder.tma_persistent import processors

ROWS = 64  # of a warpgroup: the M of one wgmma
CONSUMERS = 2
TILE = (CONSUMERS * ROWS, 256)
BLOCK_K = 64
STAGES = 4
GROUP = 8
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _tile_position(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """Row and column of the first element of a tile, in the order of l2_order.py."""
    tiles_n = gl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    height = gl.minimum(gl.cdiv(M, BLOCK_M) - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return (first + within % height) * BLOCK_M, within // height * BLOCK_N


@gluon.jit
def _load(a_desc, b_desc, rings, barriers, sizes, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Body of the loading warp: fills a stage as soon as both warpgroups have freed it."""
    a_ring, b_ring = rings
    full, empty = barriers
    M, N, K, tiles = sizes
    BLOCK_M: gl.constexpr = CONSUMERS * a_desc.block_shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_shape[0]
    BYTES: gl.constexpr = CONSUMERS * a_desc.block_type.nbytes + b_desc.block_type.nbytes
    loaded = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = _tile_position(tile, M, N, BLOCK_M, b_desc.block_shape[1], GROUP)
        for block in range(gl.cdiv(K, BLOCK_K)):
            stage = loaded % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (loaded // STAGES & 1) ^ 1)
            mbarrier.expect(ready, BYTES)
            for consumer in gl.static_range(CONSUMERS):
                part = a_ring.index(stage * CONSUMERS + consumer)
                tma.async_copy_global_to_shared(a_desc, [row + consumer * a_desc.block_shape[0], block * BLOCK_K], ready, part)
            tma.async_copy_global_to_shared(b_desc, [block * BLOCK_K, column], ready, b_ring.index(stage))
            loaded += 1


@gluon.jit
def _multiply(
    out_desc, rings, out_buffers, barriers, sizes,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, consumer: gl.constexpr,
):  # fmt: skip
    """Body of a warpgroup: its 64 rows of every tile of this program."""
    a_ring, b_ring = rings
    full, empty = barriers
    M, N, K, tiles = sizes
    ROWS: gl.constexpr = a_ring.shape[1]
    BLOCK_K: gl.constexpr = b_ring.shape[1]
    BLOCK_N: gl.constexpr = b_ring.shape[2]
    HALF: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    buffer = out_buffers.index(consumer)
    used = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = _tile_position(tile, M, N, CONSUMERS * ROWS, BLOCK_N, GROUP)
        total = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
        for block in range(gl.cdiv(K, BLOCK_K)):
            stage = used % STAGES
            mbarrier.wait(full.index(stage), used // STAGES & 1)
            total = warpgroup_mma(a_ring.index(stage * CONSUMERS + consumer), b_ring.index(stage), total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), count=1, pred=block > 0)
            used += 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), count=1)
        # In halves, because shared memory holds no more beside the ring.
        left, right = gl.split(total.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
        for half in gl.static_range(2):
            tma.store_wait(pendings=0)
            buffer.store((left if half == 0 else right).to(out_desc.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [row + consumer * ROWS, column + half * HALF], buffer)
    tma.store_wait(pendings=0)


@gluon.jit
def warp_specialized_kernel(
    a_desc, b_desc, out_desc, M, N, K, tiles, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr
):
    dtype: gl.constexpr = a_desc.dtype
    a_ring = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, a_desc.block_shape[0], a_desc.block_shape[1]], a_desc.layout)
    b_ring = gl.allocate_shared_memory(dtype, [STAGES, b_desc.block_shape[0], b_desc.block_shape[1]], b_desc.layout)
    out_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, out_desc.block_shape[0], out_desc.block_shape[1]], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    rings = (a_ring, b_ring)
    barriers = (full, empty)
    sizes = (M, N, K, tiles)
    gl.warp_specialize(
        [
            (_multiply, (out_desc, rings, out_buffers, barriers, sizes, CONSUMERS, STAGES, GROUP, 0)),
            (_multiply, (out_desc, rings, out_buffers, barriers, sizes, CONSUMERS, STAGES, GROUP, 1)),
            (_load, (a_desc, b_desc, rings, barriers, sizes, CONSUMERS, STAGES, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    (rows, inner), columns = a.shape, b.shape[1]
    tiles = triton.cdiv(rows, TILE[0]) * triton.cdiv(columns, TILE[1])
    descriptors = (
        TensorDescriptor.from_tensor(a, [ROWS, BLOCK_K], LAYOUT),
        TensorDescriptor.from_tensor(b, [BLOCK_K, TILE[1]], LAYOUT),
        TensorDescriptor.from_tensor(out, [ROWS, TILE[1] // 2], LAYOUT),
    )
    warp_specialized_kernel[(min(processors(out.device), tiles),)](
        *descriptors, rows, columns, inner, tiles, CONSUMERS, STAGES, GROUP, num_warps=4, maxnreg=168
    )
