"""Aliases of models, by weight."""

from collections import Counter

import pytest

from strata.serving.catalogue import alias

WEIGHTS = {"small": 95.0, "small-v2": 5.0}


def test_users_are_spread_by_weight_and_stay() -> None:
    first = [alias.choose("chat", WEIGHTS, f"user-{number}") for number in range(20_000)]
    assert first == [alias.choose("chat", WEIGHTS, f"user-{number}") for number in range(20_000)]
    assert Counter(first)["small-v2"] / 20_000 == pytest.approx(0.05, abs=0.007)


def test_a_larger_canary_takes_users_only_from_the_other() -> None:
    larger = {"small": 80.0, "small-v2": 20.0}
    for number in range(2000):
        if alias.choose("chat", WEIGHTS, str(number)) == "small-v2":
            assert alias.choose("chat", larger, str(number)) == "small-v2"


def test_aliases_are_independent() -> None:
    half = {"a": 1.0, "b": 1.0}
    same = sum(alias.choose("x", half, str(number)) == alias.choose("y", half, str(number)) for number in range(4000))
    assert same / 4000 == pytest.approx(0.5, abs=0.05)


def test_requests_without_a_user_are_spread() -> None:
    found = Counter(alias.choose("chat", {"a": 1.0, "b": 3.0}, None) for _ in range(4000))
    assert found["b"] / 4000 == pytest.approx(0.75, abs=0.04)


def test_a_weight_of_zero_gets_nothing() -> None:
    assert {alias.choose("chat", {"a": 0.0, "b": 1.0, "c": 0.0}, str(number)) for number in range(1000)} == {"b"}
