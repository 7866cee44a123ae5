"""Rows of prepared fine-tuning data as the trainer reads them: tokens, shifted targets and positions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.training.data.finetuning import mixing
from strata.training.data.finetuning.store import read_meta, split_file
from strata.training.data.rows import RowBatch, TrainingData
from strata.training.data.sampler import Indices
from strata.training.data.shards import Split
from strata.training.targets import IGNORED


class Rows:
    """Rows of a split, numbered through all sets in their order; `sizes` has the rows of each set."""

    def __init__(self, folder: Path, split: Split) -> None:
        self.meta = read_meta(folder)
        self.sizes = tuple(one.counts[split].rows for one in self.meta.sets)
        self._ids = np.memmap(split_file(folder, split, "ids.bin"), self.meta.dtype, "r")
        self._mask = np.memmap(split_file(folder, split, "mask.bin"), np.uint8, "r")
        names = ("documents", "rows", "loss", "labels", "places")
        arrays = {name: np.load(split_file(folder, split, f"{name}.npy"), mmap_mode="r") for name in names}
        self._documents, self._rows, self._loss = arrays["documents"], arrays["rows"], arrays["loss"]
        self._labels, self._places = arrays["labels"], arrays["places"]

    def __len__(self) -> int:
        return len(self._loss)

    def loss_tokens(self, indices: Indices) -> Indices:
        """Targets that count, of each row."""
        return np.asarray(self._loss[indices], np.int64)

    def documents(self, indices: Indices) -> Indices:
        """Numbers, in this split, of the documents of rows."""
        found = [np.arange(self._rows[index], self._rows[index + 1], dtype=np.int64) for index in indices.tolist()]
        return np.concatenate([np.empty(0, np.int64), *found])

    def document_count(self) -> int:
        return int(self._rows[-1])

    def desirable(self) -> tuple[int, int]:
        """Number of desirable and of undesirable answers in the split."""
        if self.meta.objective == "pairs":
            return self.document_count() // 2, self.document_count() // 2
        return int((self._labels == 1).sum()), int((self._labels == 0).sum())

    def largest_token(self) -> int:
        return int(self._ids.max(initial=0))

    def evenly(self, count: int) -> Indices:
        """Indices of `count` rows spread evenly over the split, or of all if there are fewer. Always the same ones."""
        return np.unique(np.linspace(0, len(self) - 1, min(count, len(self)), dtype=np.int64))

    def lengths(self, index: int) -> list[int]:
        """Tokens of each document of a row, without the padding."""
        first, last = self._rows[index], self._rows[index + 1]
        return [int(length) for length in np.diff(self._documents[first : last + 1])]

    def places(self, index: int) -> list[str]:
        """Input and line of each document of a row."""
        found = []
        for number, line in self._places[self._rows[index] : self._rows[index + 1]].tolist():
            name, unit = self.meta.inputs[number]
            found.append(f"{unit} {line:,} of {name}")
        return found

    def read(self, indices: Indices) -> RowBatch:
        shape = (len(indices), self.meta.context)
        tokens = np.full(shape, self.meta.pad, np.int64)
        targets = np.full(shape, IGNORED, np.int64)
        positions = np.empty(shape, np.int64)
        documents: list[int] = []
        labels: list[list[bool]] = []
        for row, index in enumerate(indices.tolist()):
            ids, counted, starts = self.content(index)
            tokens[row, : len(ids)] = ids
            counted[starts[:-1]] = False  # nothing precedes a document's first token
            at = np.flatnonzero(counted)
            targets[row, at - 1] = tokens[row, at]
            bounds = np.append(starts, self.meta.context)
            positions[row] = np.arange(self.meta.context) - np.repeat(bounds[:-1], np.diff(bounds))
            documents.append(len(starts) - 1)
            labels.append(self._desirable(index))
        if self.meta.objective == "tokens":
            return RowBatch(tokens, targets, positions)
        return RowBatch(tokens, targets, positions, documents, labels)

    def content(self, index: int) -> tuple[Indices, NDArray[np.bool_], Indices]:
        """Tokens of a row without its padding, whether each counts, and where the documents and the padding begin."""
        offsets = np.asarray(self._documents[self._rows[index] : self._rows[index + 1] + 1], np.int64)
        mine = slice(int(offsets[0]), int(offsets[-1]))
        return self._ids[mine].astype(np.int64), self._mask[mine].astype(bool), offsets - offsets[0]

    def _desirable(self, index: int) -> list[bool]:
        first, last = int(self._rows[index]), int(self._rows[index + 1])
        if self.meta.objective == "pairs":
            return [True, False] * ((last - first) // 2)
        return [label == 1 for label in self._labels[first:last].tolist()]


def training_data(folder: Path, weights: Sequence[float]) -> TrainingData:
    """Both splits, and an order that mixes the sets by weight."""
    train = Rows(folder, "train")

    def order(step: int, batch: int, rank: int, world: int, seed: int) -> Indices:
        return mixing.step_indices(step, batch, rank, world, train.sizes, weights, seed)

    return TrainingData(train, Rows(folder, "validation"), order)
