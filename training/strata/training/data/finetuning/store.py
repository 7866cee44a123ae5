"""Folder of prepared rows: memory-mapped tokens, masks and row plans of both splits.

Documents are stored in the order of the rows, so a row is one contiguous read. Files of a split:

- `ids.bin` and `mask.bin`: tokens, and 1 for each that counts as a target
- `documents.npy`: offset of each document in tokens, and the end of the last
- `rows.npy`: offset of each row in documents, and the end of the last
- `loss.npy`: targets that count, of each row
- `labels.npy`: label of each document, -1 without one
- `places.npy`: input and line of each document
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from strata.training.data.cached_folder import all_files
from strata.training.data.digests import Files
from strata.training.data.finetuning.rendered import COUNTED, RenderedInput
from strata.training.data.shards import SPLITS, Split

FORMAT = 1  # increased when the same examples would produce other rows

Indices = NDArray[np.int64]
Objective = Literal["tokens", "pairs", "labels"]


@dataclass(frozen=True)
class Counts:
    """Size of a set in a split. `counted` are the targets that count in the loss."""

    rows: int
    documents: int
    tokens: int
    counted: int

    def __sub__(self, other: "Counts") -> "Counts":
        rows, documents = self.rows - other.rows, self.documents - other.documents
        return Counts(rows, documents, self.tokens - other.tokens, self.counted - other.counted)


@dataclass(frozen=True)
class SetMeta:
    """Size of a set. `examples` and `counts` are by split."""

    title: str
    kind: str
    examples: dict[str, int]
    counts: dict[Split, Counts]

    def fill(self, split: Split, context: int) -> float:
        """Share of the rows' tokens that are not padding."""
        return self.counts[split].tokens / (self.counts[split].rows * context)


@dataclass(frozen=True)
class Meta:
    """Metadata of the rows. `objective`: documents are predicted token by token, are pairs of a chosen and a rejected answer, or
    are labelled good or bad. `special` has each added token in use with its name and the first example with it; `notes` are
    lines for the user."""

    context: int
    dtype: str
    pad: int
    objective: Objective
    sets: list[SetMeta]
    inputs: list[list[str]]  # name and unit
    special: list[tuple[int, str, str]]
    notes: list[str]
    digest: str = ""


def read_meta(folder: Path) -> Meta:
    found = json.loads((folder / "meta.json").read_text())
    sets = []
    for one in found.pop("sets"):
        counts = {split: Counts(**one["counts"][split]) for split in SPLITS}
        sets.append(SetMeta(one["title"], one["kind"], one["examples"], counts))
    special = [(token, name, place) for token, name, place in found.pop("special")]
    return Meta(**found, sets=sets, special=special)


def split_file(folder: Path, split: Split, name: str) -> Path:
    return folder / f"{split}-{name}"


@dataclass(frozen=True)
class PlannedRows:
    """Rows of one set and split. Row r has the units order[offsets[r]:offsets[r + 1]]; unit u has `width` parts of tokens, from
    u * width on."""

    order: Indices
    offsets: Indices
    width: int
    inputs: Indices  # of each part
    begins: Indices
    ends: Indices
    examples: Indices

    def parts(self) -> Iterator[Indices]:
        """Parts of each row, in order."""
        for begin, end in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            units = self.order[begin:end]
            yield (units[:, None] * self.width + np.arange(self.width)).ravel()


def write_rows(
    folder: Path, split: Split, plans: Sequence[PlannedRows], inputs: Sequence[RenderedInput], dtype: str
) -> list[Counts]:
    """Writes the rows of all sets, one set after another, and returns the size of each."""
    writer, sizes = _Writer(folder, split, dtype), list[Counts]()
    for plan in plans:
        before = writer.counts()
        for parts in plan.parts():
            writer.add_row(plan, parts, inputs)
        sizes.append(writer.counts() - before)
    writer.finish()
    return sizes


def write_meta(folder: Path, meta: Meta) -> None:
    """Writes the metadata, with the digest of the files that are there."""
    meta = replace(meta, digest=Files(all_files(folder)).digest())
    (folder / "meta.json").write_text(json.dumps(asdict(meta)))


class _Writer:
    def __init__(self, folder: Path, split: Split, dtype: str) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._ids = split_file(folder, split, "ids.bin").open("wb")
        self._mask = split_file(folder, split, "mask.bin").open("wb")
        self._documents, self._rows, self._loss = [0], [0], list[int]()
        self._labels, self._places = list[int](), list[tuple[int, int]]()
        self._counted = 0

    def add_row(self, plan: PlannedRows, parts: Indices, inputs: Sequence[RenderedInput]) -> None:
        loss = 0
        for part in parts.tolist():
            number, example = int(plan.inputs[part]), int(plan.examples[part])
            source = inputs[number]
            tokens = source.read(int(plan.begins[part]), int(plan.ends[part]))
            counted = tokens >= COUNTED
            self._ids.write((tokens & ~COUNTED).astype(self._dtype).tobytes())
            self._mask.write(counted.astype(np.uint8).tobytes())
            self._documents.append(self._documents[-1] + len(tokens))
            self._labels.append(int(source.labels[example]))
            self._places.append((number, int(source.numbers[example])))
            loss += int(counted[1:].sum())
        self._rows.append(len(self._documents) - 1)
        self._loss.append(loss)
        self._counted += loss

    def counts(self) -> Counts:
        return Counts(len(self._loss), len(self._documents) - 1, self._documents[-1], self._counted)

    def finish(self) -> None:
        self._ids.close()
        self._mask.close()
        arrays: dict[str, NDArray[Any]] = {
            "documents": np.array(self._documents, np.int64),
            "rows": np.array(self._rows, np.int64),
            "loss": np.array(self._loss, np.int64),
            "labels": np.array(self._labels, np.int8),
            "places": np.array(self._places, np.int64).reshape(-1, 2),
        }
        for name, array in arrays.items():
            np.save(split_file(self._folder, self._split, f"{name}.npy"), array)
