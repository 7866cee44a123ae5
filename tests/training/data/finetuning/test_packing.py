"""Best-fit packing, compared with a plain search over all rows, and how full the rows are."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.training.data.finetuning.packing import one_each, pack


def rows_of(lengths: list[int], context: int) -> list[list[int]]:
    order, offsets = pack(np.array(lengths, np.int64), context)
    assert order.dtype == offsets.dtype == np.int64
    return [order[begin:end].tolist() for begin, end in pairwise(offsets)]


def plain_rows(lengths: list[int], context: int) -> list[list[int]]:
    """Longest document first, each into the row that it fills most; of equal rows, the one that was filled last."""
    rows: list[list[int]] = []
    filled_at: list[int] = []
    for time, document in enumerate(sorted(range(len(lengths)), key=lambda each: -lengths[each])):
        spaces = [context - sum(lengths[each] for each in row) for row in rows]
        fitting = [row for row, space in enumerate(spaces) if space >= lengths[document]]
        if fitting:
            row = min(fitting, key=lambda each: (spaces[each], -filled_at[each]))
            rows[row].append(document)
            filled_at[row] = time
        else:
            rows.append([document])
            filled_at.append(time)
    return rows


@settings(deadline=None)
@given(context=st.integers(1, 40), data=st.data())
def test_rows_equal_the_plain_search(context: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, context), max_size=40))
    rows = rows_of(lengths, context)
    assert rows == plain_rows(lengths, context)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[document] for document in row) <= context for row in rows)


def test_documents_that_fill_a_row_exactly() -> None:
    assert rows_of([3, 10, 7], 10) == [[1], [2, 0]]
    assert rows_of([10, 10], 10) == [[0], [1]]
    assert rows_of([], 10) == []


def test_tightest_row_is_chosen() -> None:
    assert rows_of([8, 6, 2], 10) == [[0, 2], [1]]
    assert rows_of([6, 8, 3], 10) == [[1], [0, 2]]


@pytest.mark.parametrize("lengths", [[0], [11], [5, 11]])
def test_documents_that_cannot_be_packed_are_refused(lengths: list[int]) -> None:
    with pytest.raises(AssertionError):
        rows_of(lengths, 10)


@pytest.mark.parametrize("context", [2048, 8192])
def test_rows_are_nearly_full(context: int) -> None:
    """Lengths as in chat data: many short documents and a long tail."""
    lengths = np.random.default_rng(0).lognormal(6, 1, 20_000).astype(np.int64).clip(4, context)
    _, offsets = pack(lengths, context)
    assert lengths.sum() / ((len(offsets) - 1) * context) > 0.999


def test_one_document_in_each_row() -> None:
    order, offsets = one_each(3)
    assert order.tolist() == [0, 1, 2] and offsets.tolist() == [0, 1, 2, 3]
    order, offsets = one_each(0)
    assert order.tolist() == [] and offsets.tolist() == [0]
