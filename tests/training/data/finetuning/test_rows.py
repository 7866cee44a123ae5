"""Rows as the trainer reads them, compared with rows built token by token."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.training.data.finetuning.rendered import COUNTED, UNLABELED
from strata.training.data.finetuning.rows import Rows
from strata.training.data.finetuning.store import Counts, Meta, Objective, PlannedRows, SetMeta, read_meta, write_meta, write_rows

PAD = 99
Tokens = list[tuple[int, bool]]  # id, and whether it counts


@dataclass
class Stub:
    tokens: Any
    labels: Any
    numbers: Any

    def read(self, begin: int, end: int) -> Any:
        return self.tokens[begin:end]


def write(
    folder: Path, sets: list[list[list[Tokens]]], context: int, objective: Objective = "tokens", labels: list[int] | None = None
) -> None:
    """Writes rows of documents as the training split, and the first row as validation. Each set is one input."""
    width = 2 if objective == "pairs" else 1
    inputs: list[Any] = []
    plans: list[PlannedRows] = []
    for rows in sets:
        documents = [document for row in rows for document in row]
        flat = [token for document in documents for token in document]
        ends = np.cumsum([len(document) for document in documents])
        examples = np.arange(len(documents)) // width
        numbers = np.full(len(documents), len(inputs))
        offsets = np.cumsum([0, *(len(row) // width for row in rows)])
        order = np.arange(len(documents) // width)
        plans.append(PlannedRows(order, offsets, width, numbers, ends - [len(each) for each in documents], ends, examples))
        given_labels = labels or [UNLABELED] * len(documents)
        inputs.append(
            Stub(
                np.array([token | (int(COUNTED) if counts else 0) for token, counts in flat], np.uint32),
                np.array(given_labels, np.int8),
                np.arange(len(documents)) + 1,
            )
        )
    counts = {split: write_rows(folder, split, plans, inputs, "uint16") for split in ("train", "validation")}
    metas = [SetMeta(f"set {n}", "chat", {}, {split: counts[split][n] for split in counts}) for n in range(len(sets))]
    names = [[f"{number}.jsonl", "line"] for number in range(len(sets))]
    write_meta(folder, Meta(context, "uint16", PAD, objective, metas, names, [(3, "<s>", "line 1")], ["a note"]))


def plain_row(row: list[Tokens], context: int) -> tuple[list[int], list[int], list[int]]:
    tokens, targets, positions = [], [], []
    for document in row:
        for place, (token, _) in enumerate(document):
            following = document[place + 1] if place + 1 < len(document) else (0, False)
            tokens.append(token)
            targets.append(following[0] if following[1] else -100)
            positions.append(place)
    space = context - len(tokens)
    return tokens + [PAD] * space, targets + [-100] * space, positions + list(range(space))


DOCUMENT = st.lists(st.tuples(st.integers(0, 90), st.booleans()), min_size=1, max_size=6)
ROWS = st.lists(st.lists(DOCUMENT, min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(sets=st.lists(ROWS, min_size=1, max_size=3), extra=st.integers(0, 5))
def test_rows_equal_those_built_token_by_token(sets: list[list[list[Tokens]]], extra: int) -> None:
    every = [row for rows in sets for row in rows]
    context = max(sum(map(len, row)) for row in every) + extra
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), sets, context)
        rows = Rows(Path(name), "train")
        assert len(rows) == len(every) and rows.sizes == tuple(map(len, sets))
        indices = np.arange(len(every))[::-1]
        batch = rows.read(indices)
        for array in (batch.tokens, batch.targets, batch.positions):
            assert array.dtype == np.int64 and array.shape == (len(every), context)
        expected = [plain_row(every[index], context) for index in indices]
        assert batch.tokens.tolist() == [tokens for tokens, _, _ in expected]
        assert batch.targets.tolist() == [targets for _, targets, _ in expected]
        assert batch.positions.tolist() == [positions for _, _, positions in expected]
        assert batch.documents is None and batch.labels is None
        counted = [sum(target != -100 for target in targets) for _, targets, _ in expected]
        assert rows.loss_tokens(indices).tolist() == counted
        for index, row in enumerate(every):
            assert rows.lengths(index) == [len(document) for document in row]


def test_counts_of_sets(tmp_path: Path) -> None:
    sets: list[list[list[Tokens]]] = [[[[(1, True), (2, True)], [(3, False)]]], [[[(4, False), (5, True)]], [[(6, False)]]]]
    write(tmp_path, sets, 4)
    meta = read_meta(tmp_path)
    assert [one.counts["train"] for one in meta.sets] == [Counts(1, 2, 3, 1), Counts(2, 2, 3, 1)]
    assert [one.fill("train", 4) for one in meta.sets] == [3 / 4, 3 / 8]
    assert meta.special == [(3, "<s>", "line 1")] and meta.notes == ["a note"]
    rows = Rows(tmp_path, "train")
    assert rows.places(0) == ["line 1 of 0.jsonl", "line 2 of 0.jsonl"] and rows.places(2) == ["line 2 of 1.jsonl"]


def test_pairs_are_counted(tmp_path: Path) -> None:
    one: Tokens = [(1, False), (2, True)]
    write(tmp_path, [[[one, one, one, one], [one, one]]], 10, "pairs")
    batch = Rows(tmp_path, "train").read(np.array([1, 0]))
    assert batch.documents == [2, 4] and batch.labels == [[True, False], [True, False, True, False]]
    assert Rows(tmp_path, "train").desirable() == (3, 3)
    assert np.flatnonzero(batch.positions[1] == 0).tolist() == [0, 2, 4, 6, 8]  # the padding is one more document


def test_labels_are_those_of_the_documents(tmp_path: Path) -> None:
    one: Tokens = [(1, False), (2, True)]
    write(tmp_path, [[[one, one], [one]]], 10, "labels", [1, 0, 1])
    batch = Rows(tmp_path, "train").read(np.array([0, 1, 1]))
    assert batch.documents == [2, 1, 1] and batch.labels == [[True, False], [True], [True]]
    assert Rows(tmp_path, "train").desirable() == (2, 1)


@pytest.mark.parametrize(
    ("count", "indices"), [(1, [0]), (2, [0, 5]), (3, [0, 2, 5]), (4, [0, 1, 3, 5]), (6, [*range(6)]), (7, [*range(6)])]
)
def test_evaluation_rows(tmp_path: Path, count: int, indices: list[int]) -> None:
    write(tmp_path, [[[[(number, True)]] for number in range(6)]], 4)
    assert Rows(tmp_path, "train").evenly(count).tolist() == indices
