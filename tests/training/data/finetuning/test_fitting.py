"""Documents longer than a row, and the split into training and validation."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.training.data.finetuning.fitting import Fitted, fit
from strata.training.data.finetuning.rendered import COUNTED
from strata.training.data.finetuning.splitting import held_out


@dataclass
class Stub:
    """Rendered examples: `examples` has the masks of the documents of each."""

    tokens: Any
    documents: Any
    examples: Any
    numbers: Any

    def read(self, begin: int, end: int) -> Any:
        return self.tokens[begin:end]


def stub(examples: list[list[list[int]]]) -> Any:
    masks = [mask for documents in examples for mask in documents]
    flat = np.array([bit for mask in masks for bit in mask], np.uint32)
    return Stub(
        tokens=flat * COUNTED,  # every id is 0
        documents=np.cumsum([0, *map(len, masks)]),
        examples=np.cumsum([0, *map(len, examples)]),
        numbers=np.arange(len(examples)),
    )


def parts(fitted: Fitted) -> list[tuple[int, int, int]]:
    return list(zip(fitted.examples.tolist(), fitted.begins.tolist(), fitted.ends.tolist(), strict=True))


def test_long_documents_are_dropped() -> None:
    rendered = stub([[[1] * 4], [[1] * 5], [[1] * 6, [1] * 2, [1] * 7]])
    fitted = fit(rendered, "chat", 1, 5, "drop")
    assert parts(fitted) == [(0, 0, 4), (1, 4, 9), (2, 15, 17)]
    assert fitted.long.tolist() == [2] and fitted.lengths.tolist() == [6]


def test_long_documents_are_truncated_unless_nothing_counts_then() -> None:
    rendered = stub([[[0, 0, 1, 1, 1, 1]], [[0, 0, 0, 0, 0, 1]], [[1, 0, 0, 0, 0, 1]], [[0, 0, 0, 0, 1, 1]], [[1, 1]]])
    fitted = fit(rendered, "chat", 1, 5, "truncate")
    assert parts(fitted) == [(0, 0, 5), (3, 18, 23), (4, 24, 26)]
    assert fitted.long.tolist() == [1, 2] and fitted.lengths.tolist() == [6, 6]


def test_pairs_fit_together() -> None:
    rendered = stub([[[1] * 4, [1] * 6], [[1] * 4, [1] * 7], [[1] * 2, [1] * 3]])
    fitted = fit(rendered, "preference", 2, 10, "drop")
    assert parts(fitted) == [(0, 0, 4), (0, 4, 10), (2, 21, 23), (2, 23, 26)]
    assert fitted.long.tolist() == [1] and fitted.lengths.tolist() == [11]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((4, 9), (4, 6)), ((9, 4), (6, 4)), ((7, 8), (5, 5)), ((5, 6), (5, 5)), ((6, 5), (5, 5)), ((1, 30), (1, 9))],
)
def test_pairs_share_a_row(sizes: tuple[int, int], expected: tuple[int, int]) -> None:
    rendered = stub([[[1] * (sizes[0] + 1), [1] * (sizes[1] + 1)]])
    fitted = fit(rendered, "preference", 2, 12, "truncate")
    assert (fitted.ends - fitted.begins).tolist() == [expected[0] + 1, expected[1] + 1]


def test_pair_of_which_one_answer_would_not_count_is_dropped() -> None:
    rendered = stub([[[0, 1], [0] * 9 + [1]]])
    fitted = fit(rendered, "preference", 2, 10, "truncate")
    assert parts(fitted) == [] and fitted.long.tolist() == [0]


def test_odd_context_is_shared_as_well() -> None:
    rendered = stub([[[1] * 2, [1] * 2], [[1] * 6, [1] * 20], [[1] * 20, [1] * 20]])
    fitted = fit(rendered, "preference", 2, 13, "truncate")
    assert (fitted.ends - fitted.begins).tolist() == [2, 2, 6, 7, 6, 6]
    assert fitted.begins.tolist() == [0, 2, 4, 10, 30, 50]


@given(sizes=st.lists(st.integers(2, 40), min_size=1, max_size=8), context=st.integers(2, 12))
def test_every_token_of_a_text_is_a_target_once(sizes: list[int], context: int) -> None:
    rendered = stub([[[1] * size] for size in sizes])
    fitted = fit(rendered, "text", 1, context, "drop")
    targets: list[int] = []
    for example, begin, end in parts(fitted):
        assert 2 <= end - begin <= context
        assert rendered.documents[example] <= begin and end <= rendered.documents[example + 1]
        targets += range(begin + 1, end)
    starts = set(rendered.documents[:-1].tolist())
    assert targets == [token for token in range(sum(sizes)) if token not in starts]
    assert len(fitted.long) == 0


HASHES = st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=30)


@given(hashes=HASHES, holdout=st.floats(0.001, 0.499))
def test_split_by_hash(hashes: list[int], holdout: float) -> None:
    outside = held_out(np.array(hashes, np.uint64), holdout)
    if len(set(hashes)) == 1:
        assert outside is None
        return
    assert outside is not None and outside.any() and not outside.all()
    validation = {value for value, out in zip(hashes, outside, strict=True) if out}
    training = {value for value, out in zip(hashes, outside, strict=True) if not out}
    assert not validation & training and max(validation) < min(training)
    below = {value for value in hashes if value <= int(holdout * 2**64)}
    if below and below != set(hashes):
        assert validation == below


def test_one_example_cannot_be_split() -> None:
    assert held_out(np.array([5], np.uint64), 0.1) is None
    assert held_out(np.array([5, 5], np.uint64), 0.1) is None
    two = held_out(np.array([2**64 - 1, 2**63], np.uint64), 0.1)  # none is below the share
    assert two is not None and two.tolist() == [False, True]
    two = held_out(np.array([1, 2], np.uint64), 0.1)  # both are
    assert two is not None and two.tolist() == [True, False]


def test_share_and_least_number_of_examples() -> None:
    sixteenths = np.arange(16, dtype=np.uint64) << np.uint64(60)
    quarter = held_out(sixteenths, 0.25)
    assert quarter is not None and np.flatnonzero(quarter).tolist() == [0, 1, 2, 3, 4]
    one = held_out(sixteenths[1:], 0.01)
    assert one is not None and np.flatnonzero(one).tolist() == [0]
    all_but_one = held_out(sixteenths[:3], 0.4)
    assert all_but_one is not None and np.flatnonzero(all_but_one).tolist() == [0, 1]
