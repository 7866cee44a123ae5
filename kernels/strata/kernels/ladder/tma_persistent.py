"""TMA descriptors and a persistent grid: a copy engine loads whole blocks, and one program per SM processes many tiles.

Idea: a tensor descriptor has base, shape and strides. One thread asks the Tensor Memory Accelerator for a block; no thread
computes addresses, and blocks past the edge are filled with zeros. One program per SM loops over tiles, so that launches and
prologues are paid once, and the flattened loop loads the next tile's first blocks while it stores this one.
Bound: the same warps issue copies, start products and store the tile, so the tensor cores idle at each tile's end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from strata.kernels.ladder.l2_order import tile_position


@triton.jit
def tma_persistent_kernel(
    a, b, out, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_position(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(tl.cdiv(K, BLOCK_K)):
            left = a.load([tile_m * BLOCK_M, block * BLOCK_K])
            right = b.load([block * BLOCK_K, tile_n * BLOCK_N])
            total = tl.dot(left, right, total)
        out.store([tile_m * BLOCK_M, tile_n * BLOCK_N], total.to(out.dtype))


TILE = (128, 256)
BLOCK_K = 64
GROUP = 8


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132  # an H200's


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    (rows, inner), columns = a.shape, b.shape[1]
    tiles = triton.cdiv(rows, TILE[0]) * triton.cdiv(columns, TILE[1])
    programs = min(processors(out.device), tiles)
    descriptors = (
        TensorDescriptor.from_tensor(a, [TILE[0], BLOCK_K]),
        TensorDescriptor.from_tensor(b, [BLOCK_K, TILE[1]]),
        TensorDescriptor.from_tensor(out, list(TILE)),
    )
    tma_persistent_kernel[(programs,)](
        *descriptors, rows, columns, inner, *TILE, BLOCK_K, GROUP, programs, num_warps=8, num_stages=3
    )
