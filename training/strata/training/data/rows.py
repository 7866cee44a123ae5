"""Rows of a training run: their content and their order.

A row is `model.context` tokens: a window of a corpus, or documents packed for fine-tuning. A row of a picture model is a picture
with its caption. The order is a pure function of seed and step, so a resumed run sees the same rows, in any layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from strata.training.data.sampler import Indices


@dataclass(frozen=True)
class DrawnPictures:
    """Pictures of [rows, 3, size, size] from -1 to 1, noise of the same shape, and the share of noise of each, from 0 to 1."""

    pixels: NDArray[np.float32]
    noise: NDArray[np.float32]
    times: NDArray[np.float32]


@dataclass(frozen=True)
class RowBatch:
    """Rows of [rows, context] tokens. `targets` has the token after each, or IGNORED if that does not count or is in another
    document. `positions` restart at 0 with each document, and the padding at a row's end is one more document; None: a row is one
    sequence.

    For preference data, `documents` has the number of answers of each row, one document each, and `labels` whether each is
    desirable. Of pairs, these are chosen, rejected, chosen, and so on.

    For pictures, `tokens` are the captions, and `targets` has one column, IGNORED for a row that does not count.
    """

    tokens: Indices
    targets: Indices
    positions: Indices | None
    documents: list[int] | None = None
    labels: list[list[bool]] | None = None
    pictures: DrawnPictures | None = None


class Rows(Protocol):
    """Rows of a split."""

    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> RowBatch: ...

    def loss_tokens(self, indices: Indices) -> Indices:
        """Number of targets that count, of each row."""
        ...

    def places(self, index: int) -> list[str]:
        """Source of each document of a row, for people."""
        ...

    def evenly(self, count: int) -> Indices:
        """`count` rows spread evenly over the split, always the same ones."""
        ...


class Order(Protocol):
    def __call__(self, step: int, batch: int, rank: int, world: int, seed: int) -> Indices:
        """Rows of a data-parallel rank at a step. The union over all ranks does not depend on their number."""
        ...


@dataclass(frozen=True)
class TrainingData:
    train: Rows
    validation: Rows
    order: Order


def mean_divisor(rows: Rows, indices: Sequence[int] | Indices, shares: int) -> float:
    """Denominator of each of `shares` partial losses, such that their mean is the mean over all counted targets of the rows."""
    return float(rows.loss_tokens(np.asarray(indices, dtype=np.int64)).sum()) / shares
