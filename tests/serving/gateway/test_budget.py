"""Memory budget of a gateway: 128 MiB, less what each request holds beyond its first 32 KiB."""

import pytest

from strata.serving.api.requests import ApiError
from strata.serving.gateway.budget import Budget

FREE = 32_768
LIMIT = 1000


@pytest.mark.parametrize(
    ("held", "left"), [(0, LIMIT), (FREE - 1, LIMIT), (FREE, LIMIT), (FREE + 1, LIMIT - 1), (FREE + LIMIT, 0)]
)
def test_bytes_beyond_the_free_ones_are_counted_and_returned(held: int, left: int) -> None:
    budget = Budget(LIMIT)
    with budget.hold() as hold:
        hold.grow(held)
        assert (hold.counted, budget.left) == (LIMIT - left, left)
    assert budget.left == LIMIT


def test_growth_in_steps_counts_like_growth_in_one() -> None:
    budget = Budget(LIMIT)
    with budget.hold() as hold:
        lefts = []
        for count in (30_000, 2_700, 100, 7, 300):  # 32,768 are free: 32 of the third step count
            hold.grow(count)
            lefts.append(budget.left)
        assert lefts == [1000, 1000, 968, 961, 661]


def test_each_request_has_its_own_free_bytes() -> None:
    budget = Budget(LIMIT)
    with budget.hold() as large, budget.hold() as small:
        large.grow(FREE + LIMIT)
        small.grow(FREE)
        with pytest.raises(ApiError):
            small.grow(1)
        assert budget.left == 0
    assert budget.left == LIMIT


def test_a_request_beyond_the_budget_gets_a_429_and_changes_nothing() -> None:
    budget = Budget(LIMIT)
    with budget.hold() as other, budget.hold() as hold:
        other.grow(FREE + 400)
        hold.grow(FREE + 100)
        with pytest.raises(ApiError, match="memory") as caught:
            hold.grow(501)
        assert caught.value.status == 429 and caught.value.headers == {"retry-after": "1"}
        assert (hold.counted, budget.left) == (100, 500)
        hold.grow(500)
        assert budget.left == 0


def test_require_reserves_nothing() -> None:
    budget = Budget(LIMIT)
    with budget.hold() as hold:
        hold.require(FREE + LIMIT)
        with pytest.raises(ApiError):
            hold.require(FREE + LIMIT + 1)
        assert (hold.counted, budget.left) == (0, LIMIT)


def test_bytes_are_returned_after_an_error() -> None:
    budget = Budget(LIMIT)
    with pytest.raises(KeyError), budget.hold() as hold:
        hold.grow(FREE + 10)
        raise KeyError
    assert budget.left == LIMIT


def test_the_default_is_128_mib() -> None:
    budget = Budget()
    with budget.hold() as hold:
        hold.grow(134_217_728 + FREE)
        with pytest.raises(ApiError):
            hold.grow(1)
