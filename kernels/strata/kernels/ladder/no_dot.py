"""Triton without tensor cores: a tile of the output as a sum of outer products.

Idea: Triton's smallest unit is a program that computes a tile. The compiler distributes the tile over threads, holds it in
registers and coalesces the loads, so its first version starts where the CUDA steps arrive with register tiles.
Bound: fp32 multiply-adds, and a load of one column of A per step that touches one cache line per row.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def no_dot_kernel(a, b, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    a_column = a + rows.to(tl.int64) * K
    b_row = b + columns
    for _ in range(K):
        left = tl.load(a_column, mask=rows < M, other=0.0).to(tl.float32)
        right = tl.load(b_row, mask=columns < N, other=0.0).to(tl.float32)
        total += left[:, None] * right[None, :]
        a_column += 1
        b_row += N
    places = out + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


TILE = (64, 64)


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    (rows, inner), columns = a.shape, b.shape[1]
    grid = (triton.cdiv(rows, TILE[0]), triton.cdiv(columns, TILE[1]))
    no_dot_kernel[grid](a, b, out, rows, columns, inner, *TILE, num_warps=4)
