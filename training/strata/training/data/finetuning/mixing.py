"""Stateless order of several sets mixed by weight: the row at a position is a pure function of seed and position.

Positions form blocks. Each block has the same number of rows from a set, by the largest remainders of the weights, in an order
that depends on seed and block. A set is walked through one permutation of its rows per epoch, as in `sampler`. So a resumed run
continues with the same rows on any number of data-parallel ranks, and one set alone has the order of `sampler.step_indices`.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strata.training.data.sampler import shuffled

Indices = NDArray[np.int64]

LEAST_BLOCK = 1024
LEAST_QUOTA = 50  # rows of the rarest set in a block, so that rounding changes no share by more than 1%


def step_indices(
    step: int, batch: int, rank: int, world: int, sizes: Sequence[int], weights: Sequence[float], seed: int
) -> Indices:
    """This rank's rows of step `step` (from 0). Rows are numbered through all sets, in their order. The union over all ranks
    does not depend on `world`."""
    per_rank = batch // world
    assert per_rank * world == batch
    assert len(sizes) == len(weights) and min(sizes) > 0 and min(weights) > 0
    positions = step * batch + rank * per_rank + np.arange(per_rank, dtype=np.int64)
    quotas = block_quotas(weights)
    blocks = positions // sum(quotas)
    rows = [_block_rows(positions[blocks == block] % sum(quotas), int(block), quotas, sizes, seed) for block in np.unique(blocks)]
    return np.concatenate(rows)


def block_quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Rows of each set in a block, by largest remainder; ties go to the first set. Their sum is the size of a block."""
    shares = np.array(weights, np.float64) / sum(weights)
    block = LEAST_BLOCK
    while block * shares.min() < LEAST_QUOTA:
        block *= 2
    quotas = np.floor(shares * block).astype(np.int64)
    remainders = shares * block - quotas
    quotas[np.argsort(-remainders, kind="stable")[: block - quotas.sum()]] += 1
    return tuple(quotas.tolist())


def _block_rows(offsets: Indices, block: int, quotas: tuple[int, ...], sizes: Sequence[int], seed: int) -> Indices:
    """Rows at these offsets of a block."""
    sets, draws = _arrangement(block, quotas, seed)
    rows = np.empty(len(offsets), np.int64)
    first = 0
    for number, (quota, size) in enumerate(zip(quotas, sizes, strict=True)):
        mine = sets[offsets] == number
        walked = block * quota + draws[offsets[mine]]
        epochs = walked // size
        for epoch in np.unique(epochs):
            here = np.flatnonzero(mine)[epochs == epoch]
            rows[here] = first + shuffled(walked[epochs == epoch] % size, size, _seed(seed, number), int(epoch))
        first += size
    return rows


@lru_cache(maxsize=2)  # the rows of a step are in one block, or in two
def _arrangement(block: int, quotas: tuple[int, ...], seed: int) -> tuple[Indices, Indices]:
    """Set at each offset of a block, and how many rows of it the block has before that."""
    size = sum(quotas)
    slots = shuffled(np.arange(size, dtype=np.int64), size, _seed(seed, len(quotas)), block)
    sets = np.searchsorted(np.cumsum(quotas), slots, side="right").astype(np.int64)
    draws = np.empty(size, np.int64)
    for number, quota in enumerate(quotas):
        draws[sets == number] = np.arange(quota)
    return sets, draws


def _seed(seed: int, stream: int) -> int:
    """Seed of one of several independent orders. The first is the seed itself."""
    return seed if stream == 0 else int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0])
