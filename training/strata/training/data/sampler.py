"""Which windows a step trains on: a pure function of seed and step, so that a resumed run sees what it would have seen.

Every epoch is a permutation of all windows. A permutation kept in memory would cost gigabytes on a large corpus, so it is
computed: a Feistel network is a bijection of the numbers below a power of four, and walking on from a number that is not
below `count` until one is makes it a bijection of those (Black and Rogaway, "Ciphers with arbitrary finite domains").
"""

import numpy as np
from numpy.typing import NDArray

from strata.platform.recipe import ParallelSection
from strata.training.layout import place

Indices = NDArray[np.int64]

ROUNDS = 6


def rank_indices(step: int, rank: int, batch: int, windows: int, seed: int, parallel: ParallelSection) -> Indices:
    """What a rank trains on. Ranks that share a sequence, a layer or a stage's work get the same: the data-parallel place
    decides alone. Experts are spread over ranks that each have their own."""
    return step_indices(step, batch, place(rank, parallel).data, parallel.data, windows, seed)


def step_indices(step: int, batch: int, rank: int, world: int, windows: int, seed: int) -> Indices:
    """This rank's windows of step `step` (from 0). The ranks' parts together are the same whatever `world` is."""
    share = batch // world
    assert share * world == batch
    positions = step * batch + rank * share + np.arange(share, dtype=np.int64)
    epochs = positions // windows
    return np.concatenate([shuffled(positions[epochs == e] % windows, windows, seed, int(e)) for e in np.unique(epochs)])


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
    """The finalizer of splitmix64: every input bit reaches every output bit. Products wrap, as they should."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
