"""Choice of a replica by its cost."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from strata.serving.routing.choice import least_busy


@dataclass(frozen=True)
class Replica:
    name: str
    busy: int


def replicas(*busy: int) -> list[Replica]:
    return [Replica(str(number), each) for number, each in enumerate(busy)]


@pytest.mark.parametrize(
    ("busy", "without", "chosen"),
    [
        ((3, 1, 2), "", "1"),
        ((3, 1, 2), "1", "2"),
        ((3, 1, 2), "12", "0"),
        ((3, 1, 2), "012", "1"),  # all were tried
        ((7,), "0", "0"),
        ((), "", None),
        ((), "0", None),
    ],
)
def test_the_least_busy_untried_replica_is_chosen(busy: tuple[int, ...], without: str, chosen: str | None) -> None:
    found = least_busy(replicas(*busy), lambda replica: replica.busy, without)
    assert (found and found.name) == chosen


def test_ties_are_broken_evenly() -> None:
    draw = random.Random(1)
    some = replicas(2, 1, 1, 3, 1)
    counts: Counter[str] = Counter()
    for _ in range(3000):
        found = least_busy(some, lambda replica: replica.busy, pick=draw.choice)
        assert found is not None
        counts[found.name] += 1
    assert set(counts) == {"1", "2", "4"}
    assert min(counts.values()) > 900
