"""Tensor cores: `tl.dot` multiplies a block of A with a block of B.

Idea: one instruction multiplies matrices instead of numbers. On Hopper the compiler chooses wgmma: four warps multiply blocks
that lie in shared memory.
Bound: latency. Without pipelining, a program waits for its loads, then for its product, and only other programs on the same SM
fill the gaps. A tile of 64 x 64 also reads each operand 128 times for a product of 8192 rows.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def dot_kernel(a, b, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_block = a + rows[:, None].to(tl.int64) * K + inner[None, :]
    b_block = b + inner[:, None].to(tl.int64) * N + columns[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = tl.load(a_block, mask=(rows < M)[:, None] & (inner < K - k)[None, :], other=0.0)
        right = tl.load(b_block, mask=(inner < K - k)[:, None] & (columns < N)[None, :], other=0.0)
        total = tl.dot(left, right, total)
        a_block += BLOCK_K
        b_block += BLOCK_K * N
    places = out + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


TILE = (64, 64)


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    (rows, inner), columns = a.shape, b.shape[1]
    grid = (triton.cdiv(rows, TILE[0]), triton.cdiv(columns, TILE[1]))
    dot_kernel[grid](a, b, out, rows, columns, inner, *TILE, 32, num_warps=4, num_stages=1)
