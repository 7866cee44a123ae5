"""Choice by expected time to first token."""

from dataclasses import dataclass
from typing import Any

import pytest

from strata.serving.routing.kv.expected_wait import (
    FEW_STREAMS,
    STALL_WEIGHT,
    STREAM_TOKENS,
    TOKEN_S,
    Chosen,
    CostMeter,
    Costs,
    choose,
    wait_s,
)

COSTS = Costs(token_s=0.001, stream_s=0.01)  # a stream costs as much as ten tokens


@dataclass(frozen=True)
class Replica:
    name: str
    busy: int = 0


def chosen(replicas: list[Replica], cached: dict[str, int] | None = None, **more: Any) -> Chosen[Replica] | None:
    options = {"queued": {}, "costs": COSTS, "max_sequences": 64, "pick": lambda places: places[0]} | more
    return choose(replicas, cached or {}, streams=lambda replica: replica.busy, **options)


def pick(*args: Any, **more: Any) -> tuple[str, int, str]:
    found = chosen(*args, **more)
    assert found is not None
    return found.replica.name, found.cached, found.reason


IDLE = [Replica("a"), Replica("b"), Replica("c")]


def test_longest_cached_prefix_wins_among_idle_replicas() -> None:
    assert pick(IDLE, {"a": 16, "c": 32}) == ("c", 32, "prefix")


@pytest.mark.parametrize(("streams", "name", "reason"), [(9, "a", "prefix"), (11, "b", "load")])
def test_prefix_spreads_when_its_replica_is_busier_than_it_is_worth(streams: int, name: str, reason: str) -> None:
    found = pick([Replica("a", streams), Replica("b")], {"a": 100})
    assert found == (name, 100 if name == "a" else 0, reason)


@pytest.mark.parametrize(("queued", "name"), [(99, "a"), (101, "b")])
def test_queued_prompts_count_as_their_tokens(queued: int, name: str) -> None:
    assert pick([Replica("a"), Replica("b")], {"a": 100}, queued={"a": queued})[0] == name


def test_without_prefixes_the_least_loaded_is_chosen() -> None:
    assert pick([Replica("a", 2), Replica("b", 1), Replica("c", 1)]) == ("b", 0, "new")
    assert pick([Replica("a", 2), Replica("b", 1)], queued={"b": 20}) == ("a", 0, "new")


def test_full_replica_waits_for_a_sequence_to_end() -> None:
    full, free = [Replica("a", 4), Replica("b", 3)], {"a": 12}
    assert pick(full, free, max_sequences=5)[0] == "a"  # one more fits
    assert pick(full, free, max_sequences=4)[0] == "b"
    assert wait_s(COSTS, 0, 4, 4) == pytest.approx(0.01 * (4 + 1 / STALL_WEIGHT))
    assert wait_s(COSTS, 0, 3, 4) == pytest.approx(0.03)
    assert wait_s(COSTS, 7, 6, 4) == pytest.approx(0.007 + 0.01 * (6 + 3 / STALL_WEIGHT))


def test_excluded_replicas_are_chosen_only_without_others() -> None:
    assert pick(IDLE, {"c": 32, "a": 16}, without={"c"}) == ("a", 16, "prefix")
    assert pick(IDLE, {"c": 32}, without={"c"}) == ("a", 0, "new"), "a lost replica's cache is none"
    assert pick(IDLE, {"c": 32}, without={"a", "b", "c"}) == ("c", 32, "prefix")
    assert chosen([]) is None


def test_ties_are_broken_by_pick() -> None:
    found = {pick(IDLE, {"a": 8, "b": 8}, pick=lambda places, k=k: places[k])[0] for k in range(2)}
    assert found == {"a", "b"}
    drawn = {choose(IDLE, {}, {}, lambda _: 0, COSTS, 64).replica.name for _ in range(200)}  # type: ignore[union-attr]
    assert drawn == {"a", "b", "c"}


def test_replica_that_is_unknown_here_does_not_matter() -> None:
    assert pick(IDLE, {"gone": 500, "b": 8}) == ("b", 8, "prefix")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_costs_are_sensible_before_the_first_sample_and_after_the_last() -> None:
    clock = Clock()
    meter = CostMeter(clock)
    assert meter.costs() == Costs(TOKEN_S, TOKEN_S * STREAM_TOKENS)
    for _ in range(3):
        meter.prefilled(1000, 2.0)
    assert meter.costs() == Costs(pytest.approx(0.002), pytest.approx(0.002 * STREAM_TOKENS))  # type: ignore[arg-type]
    for _ in range(3):
        meter.streamed(4.0, 16)
    assert meter.costs().stream_s == pytest.approx(STALL_WEIGHT * 4.0 / 16)
    clock.now = 100.0
    assert meter.costs() == Costs(TOKEN_S, TOKEN_S * STREAM_TOKENS)


def test_short_prompts_and_few_streams_are_no_measure() -> None:
    meter = CostMeter(Clock())
    for _ in range(5):
        meter.prefilled(63, 9.0)
        meter.streamed(4.0, 1)
    assert meter.costs() == Costs(TOKEN_S, pytest.approx(STALL_WEIGHT * 4.0 / FEW_STREAMS))  # type: ignore[arg-type]
