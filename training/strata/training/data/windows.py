"""Fixed-length windows over a split's memory-mapped shards."""

from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.training.data.rows import RowBatch, TrainingData
from strata.training.data.sampler import Indices, step_indices
from strata.training.data.shards import SPLITS, Split, read_meta, shard_path


class Windows:
    """Windows of `context` tokens plus the next token, so that every token except a shard's first is predicted once."""

    def __init__(self, folder: Path, split: Split, context: int) -> None:
        meta = read_meta(folder)
        counts = [max(0, (tokens - 1) // context) for tokens in meta.shards[split]]
        self._starts = [0, *accumulate(counts)]
        self._shards = [
            np.memmap(shard_path(folder, split, number), meta.dtype, "r") if count else np.empty(0, meta.dtype)
            for number, count in enumerate(counts)
        ]
        self._names = [shard_path(folder, split, number).name for number in range(len(counts))]
        self._context = context

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, indices: Indices) -> NDArray[np.int64]:
        """[windows, context + 1]"""
        return np.stack([self._one(int(index)) for index in indices])

    def place(self, index: int) -> str:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        begin = (index - self._starts[shard]) * self._context
        return f"tokens {begin:,} to {begin + self._context:,} of {self._names[shard]}"

    def _one(self, index: int) -> NDArray[np.int64]:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        begin = (index - self._starts[shard]) * self._context
        return self._shards[shard][begin : begin + self._context + 1].astype(np.int64)

    def evenly(self, count: int) -> Indices:
        """Indices of `count` windows spread evenly over the split, or of all if there are fewer. Always the same ones."""
        return np.unique(np.linspace(0, len(self) - 1, min(count, len(self)), dtype=np.int64))


class WindowRows:
    """Windows as rows of a training run: every token is a target."""

    def __init__(self, windows: Windows, context: int) -> None:
        self._windows, self._context = windows, context

    def __len__(self) -> int:
        return len(self._windows)

    def read(self, indices: Indices) -> RowBatch:
        windows = self._windows.read(indices)
        return RowBatch(windows[:, :-1], windows[:, 1:], None)

    def loss_tokens(self, indices: Indices) -> Indices:
        return np.full(len(indices), self._context, dtype=np.int64)

    def places(self, index: int) -> list[str]:
        return [self._windows.place(index)]

    def evenly(self, count: int) -> Indices:
        return self._windows.evenly(count)


def training_data(folder: Path, context: int) -> TrainingData:
    train, validation = (WindowRows(Windows(folder, split, context), context) for split in SPLITS)

    def order(step: int, batch: int, rank: int, world: int, seed: int) -> Indices:
        return step_indices(step, batch, rank, world, len(train), seed)

    return TrainingData(train, validation, order)
