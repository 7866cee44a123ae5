"""Order of tiles: programs that run together share rows of A and columns of B.

Idea: programs start in the order of their index. Grouped by eight rows of tiles, the 132 that run together on an H200 cover a
region close to a square, so that a block read by one is in the L2 cache for its neighbours.
Bound: instructions. The threads that start the tensor cores also compute addresses, issue copies and wait for them.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tile_position(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column, in tiles, of tile number `tile`: down `GROUP` rows, then to the next column."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return first + within % height, within // height


@triton.jit
def l2_order_kernel(a, b, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    tile_m, tile_n = tile_position(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_block = a + (rows % M)[:, None].to(tl.int64) * K + inner[None, :]
    b_block = b + inner[:, None].to(tl.int64) * N + (columns % N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = tl.load(a_block, mask=(inner < K - k)[None, :], other=0.0)
        right = tl.load(b_block, mask=(inner < K - k)[:, None], other=0.0)
        total = tl.dot(left, right, total)
        a_block += BLOCK_K
        b_block += BLOCK_K * N
    places = out + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


TILE = (128, 256)
GROUP = 8


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    (rows, inner), columns = a.shape, b.shape[1]
    grid = (triton.cdiv(rows, TILE[0]) * triton.cdiv(columns, TILE[1]),)
    l2_order_kernel[grid](a, b, out, rows, columns, inner, *TILE, 64, GROUP, num_warps=8, num_stages=3)
