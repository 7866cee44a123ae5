"""Queueing formulas against textbook values, direct sums and brute force."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.planner.serving.queueing import erlang_b, erlang_c, poisson_at_most, settle, smallest


@pytest.mark.parametrize(
    ("servers", "offered", "blocked"),
    [
        (0, 3.0, 1.0),
        (1, 1.0, 1 / 2),
        (2, 1.0, 1 / 5),  # (1/2) / (1 + 1 + 1/2)
        (5, 3.0, 0.11005),  # tables of Erlang's B formula
        (10, 5.0, 0.01838),
        (3, 6.0, 36 / 61),  # (216/6) / (1 + 6 + 18 + 36)
    ],
)
def test_erlang_b(servers: int, offered: float, blocked: float) -> None:
    assert erlang_b(servers, offered) == pytest.approx(blocked, rel=1e-3)


@pytest.mark.parametrize(
    ("servers", "offered", "waits"),
    [
        (1, 0.7, 0.7),  # M/M/1: the utilization
        (2, 1.0, 1 / 3),
        (2, 1.5, 9 / 14),
        (5, 4.0, 0.5541),
        (10, 8.0, 0.4092),
        (3, 3.0, 1.0),  # saturated
        (3, 3.5, 1.0),
    ],
)
def test_erlang_c(servers: int, offered: float, waits: float) -> None:
    assert erlang_c(servers, offered) == pytest.approx(waits, rel=1e-3)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.floats(0.01, 60))
def test_erlang_b_is_the_last_term_over_the_sum(servers: int, offered: float) -> None:
    terms = [Fraction(offered) ** n / math.factorial(n) for n in range(servers + 1)]
    assert erlang_b(servers, offered) == pytest.approx(float(terms[-1] / sum(terms)))


def test_many_idle_servers_underflow_to_zero() -> None:
    assert erlang_b(100_000, 1e-3) == 0.0
    assert erlang_c(100_000, 1e-3) == 0.0


@pytest.mark.parametrize(("count", "mean"), [(0, 2.5), (3, 2.5), (7, 2.5), (30, 20.0), (0, 0.1)])
def test_poisson_tail_is_a_sum(count: int, mean: float) -> None:
    expected = sum(math.exp(-mean) * mean**n / math.factorial(n) for n in range(count + 1))
    assert poisson_at_most(count, mean) == pytest.approx(expected)


def test_poisson_ends() -> None:
    assert poisson_at_most(0, 0) == 1
    assert poisson_at_most(10**9, 5.0) == pytest.approx(1)
    assert poisson_at_most(10_000, 10_000.0) == pytest.approx(0.50266, abs=1e-4)  # a little over half, by the normal limit
    assert poisson_at_most(8_000, 10_000.0) == pytest.approx(0, abs=1e-12)


def test_a_load_settles_where_it_meets_itself() -> None:
    assert settle(lambda x: 3 + x / 4, 10) == pytest.approx(4)
    assert settle(lambda x: math.sqrt(x), 10) == pytest.approx(1)
    assert settle(lambda x: 5, 5) == pytest.approx(5)  # at the limit itself
    assert settle(lambda x: 5.001, 5) is None
    assert settle(lambda x: 0, 10) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 100])
def test_smallest_is_found_by_bisection(limit: int) -> None:
    for answer in range(1, limit + 1):
        tried: list[int] = []

        def enough(count: int, answer: int = answer, tried: list[int] = tried) -> bool:
            tried.append(count)
            return count >= answer

        assert smallest(enough, limit) == answer
        assert max(tried) <= limit and min(tried) >= 1
        assert len(tried) <= 2 * math.log2(limit) + 3
    assert smallest(lambda count: False, limit) is None
