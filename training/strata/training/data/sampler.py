"""Stateless sampler: the windows of a step are a pure function of seed and step, so a resumed run sees the same data.

Every epoch is a permutation of all windows. Storing a permutation would cost gigabytes on a large corpus, so it is computed. A
Feistel network is a bijection of the integers below a power of four; cycle walking restricts it to those below `count` (Black
and Rogaway, "Ciphers with arbitrary finite domains").
"""

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

ROUNDS = 6


def step_indices(step: int, batch: int, rank: int, world: int, windows: int, seed: int) -> Indices:
    """Windows of a data-parallel rank at step `step` (from 0). The union over all ranks does not depend on `world`. Tensor,
    pipeline and sequence ranks of a data-parallel rank read the same ones; expert-parallel ranks are data-parallel ranks."""
    per_rank = batch // world
    assert per_rank * world == batch
    positions = step * batch + rank * per_rank + np.arange(per_rank, dtype=np.int64)
    epochs = positions // windows
    return np.concatenate([shuffled(positions[epochs == e] % windows, windows, seed, int(e)) for e in np.unique(epochs)])


def micro_batches(everyone: Indices, rank: int, world: int, count: int) -> list[Indices]:
    """The micro-batches of a data-parallel rank. `everyone` has the windows of the step, the same in every layout."""
    return np.split(np.split(everyone, world)[rank], count)


def shuffled(positions: Indices, count: int, seed: int, epoch: int) -> Indices:
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := values >= count).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finalizer of splitmix64: every input bit affects every output bit. Products overflow on purpose."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
