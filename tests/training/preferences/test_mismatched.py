"""Mismatched rows: every prompt has an answer to another prompt, and rows stay within the context."""

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strata.platform.errors import UserError
from strata.training.data.finetuning.rows import Rows
from strata.training.data.finetuning.store import Objective
from strata.training.preferences.mismatched import MismatchedRows

from ..data.finetuning.test_rows import Tokens, write

Texts = list[tuple[list[int], list[int]]]  # prompt and answer of each document


def document(prompt: list[int], answer: list[int]) -> Tokens:
    return [(token, False) for token in prompt] + [(token, True) for token in answer]


def mismatched(folder: Path, rows: list[Texts], context: int, objective: Objective = "labels") -> list[Texts]:
    labels = [1] * sum(map(len, rows)) if objective == "labels" else None
    write(folder, [[[document(*each) for each in row] for row in rows]], context, objective, labels)
    return [divided(MismatchedRows(folder, "train"), index) for index in range(len(rows))]


def divided(rows: Rows, index: int) -> Texts:
    ids, counted, starts = rows.content(index)
    assert len(ids) <= rows.meta.context
    found = []
    for begin, end in pairwise(starts.tolist()):
        at = begin + counted[begin:end].tolist().index(True)
        assert counted[at:end].all()
        found.append((ids[begin:at].tolist(), ids[at:end].tolist()))
    return found


def test_answers_are_rotated_in_a_row(tmp_path: Path) -> None:
    row = [([1], [10]), ([2, 2], [20, 20]), ([3], [30, 30, 30])]
    [found] = mismatched(tmp_path, [row], 12)
    assert found == [([1], [30, 30, 30]), ([2, 2], [10]), ([3], [20, 20])]
    batch = MismatchedRows(tmp_path, "train").read(np.array([0]))
    assert batch.documents == [3] and batch.tokens[0, :10].tolist() == [1, 30, 30, 30, 2, 2, 10, 3, 20, 20]
    assert batch.targets[0, :10].tolist() == [30, 30, 30, -100, -100, 10, -100, 20, 20, -100]


def test_pairs_have_the_answers_of_another_pair(tmp_path: Path) -> None:
    row = [([1], [10]), ([1], [11]), ([2], [20]), ([2], [21]), ([3], [30]), ([3], [31])]
    [found] = mismatched(tmp_path, [row], 12, "pairs")
    assert found == [([1], [30]), ([1], [31]), ([2], [10]), ([2], [11]), ([3], [20]), ([3], [21])]


def test_a_row_with_one_prompt_has_answers_from_other_rows(tmp_path: Path) -> None:
    rows = [[([1], [10, 10])], [([1], [11])], [([2], [20, 21, 22, 23])]]
    assert mismatched(tmp_path, rows, 5) == [[([1], [20, 21, 22, 23])], [([1], [20, 21, 22, 23])], [([2], [10, 10])]]


def test_answers_from_other_rows_are_cut_to_the_row(tmp_path: Path) -> None:
    rows = [[([1], [10]), ([1], [11, 12])], [([2], [20, 21, 22, 23, 24, 25])]]
    assert mismatched(tmp_path, rows, 7)[0] == [([1], [20, 21]), ([1], [20, 21, 22])]  # one token more for each


PROMPT = st.lists(st.integers(1, 3), max_size=2)
ANSWER = st.lists(st.integers(50, 59), min_size=2, max_size=5)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.lists(st.tuples(PROMPT, ANSWER), min_size=1, max_size=5), min_size=1, max_size=4), extra=st.integers(0, 4)
)
def test_no_prompt_has_an_answer_of_its_own(rows: list[Texts], extra: int) -> None:
    # An answer begins with a token that names its prompt.
    names = {prompt: number for number, prompt in enumerate(sorted({tuple(prompt) for row in rows for prompt, _ in row}))}
    assume(len(names) > 1)
    rows = [[(prompt, [60 + names[tuple(prompt)], *answer]) for prompt, answer in row] for row in rows]
    context = extra + max(sum(len(prompt) + len(answer) for prompt, answer in row) for row in rows)
    with tempfile.TemporaryDirectory() as name:
        found = mismatched(Path(name), rows, context)
    for row, other in zip(rows, found, strict=True):
        assert [prompt for prompt, _ in other] == [prompt for prompt, _ in row]
        assert all(answer[0] != 60 + names[tuple(prompt)] for prompt, answer in other)


def test_one_prompt_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [[[document([1], [10]), document([1], [11])], [document([1], [12])]]], 8, "labels", [1, 0, 1])
    with pytest.raises(UserError, match="All examples for train have the same prompt"):
        MismatchedRows(tmp_path, "train").require_two_prompts("train")
