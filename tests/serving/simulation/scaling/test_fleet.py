"""Simulated replicas that come and go: starts, drains, hours, and requests that survive all of it."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.serving.gateway.relay import REPLICA_WAIT_S
from strata.serving.scaling.demand import Seen
from strata.serving.scaling.sizing import Slo
from strata.serving.simulation.calibration import Calibration
from strata.serving.simulation.endpoint import Setup, Simulation
from strata.serving.simulation.engine import EngineSettings
from strata.serving.simulation.generated import Shape, open_loop
from strata.serving.simulation.replica import Role
from strata.serving.simulation.requests import OwnText, Request
from strata.serving.simulation.results import Results
from strata.serving.simulation.scaling.fleet import DRAIN_S, LOOK_S, Pool, Scaling

TIMES = Calibration(
    fixed_s=0.01, sequence_s=1e-4, context_token_s=1e-8, prompt_token_s=2e-5, prompt_pair_s=1e-10,
    request_s=0.01, kv_tokens=10**6, context=10**6, handoff_s=0.001, transfer_token_s=1e-6,
)  # fmt: skip
ENGINE = EngineSettings(blocks=4000, block_size=16, max_sequences=32, step_tokens=512)
SETUP = Setup(TIMES, 1, ENGINE, max_queue=10**6, context=10**6, request_s=0.01, prefill_engine=ENGINE, slo=Slo(1.0, 0.05))


class Planned:
    """Numbers of decode replicas by time."""

    def __init__(self, number: Callable[[float], int], prefill: Callable[[float], int] | None = None) -> None:
        self.number, self.prefill = number, prefill
        self.seen: list[tuple[Seen, Pool]] = []

    def decide(self, seen: Seen, pools: Mapping[Role, Pool]) -> dict[Role, int]:
        self.seen.append((seen, pools["decode"]))
        wanted: dict[Role, int] = {"decode": self.number(seen.at)}
        return wanted | ({"prefill": self.prefill(seen.at)} if self.prefill else {})


def scaled(setup: Setup, planned: Planned, startup_s: float) -> Setup:
    return replace(setup, scaling=Scaling(lambda: planned, startup_s))


def steady(seconds: int, per_s: int = 2) -> list[tuple[float, Request]]:
    return [(k / per_s, Request(k, 100, 20, OwnText(k))) for k in range(seconds * per_s)]


def test_a_replica_answers_after_its_start_and_is_paid_from_its_beginning() -> None:
    planned = Planned(lambda at: 1 if at < 50 else 3)
    results = Simulation(scaled(SETUP, planned, startup_s=30.0)).run(steady(200))
    running = {round(seen.at): pool.running for seen, pool in planned.seen}
    assert running[78] == 1 and running[82] == 3 and planned.seen[30][1].target == 3
    found = results.summary()
    hours = found["pools"]["decode"]["replica_hours"]
    assert hours == pytest.approx((results.ended_at + 2 * (results.ended_at - 50)) / 3600, rel=0.01)
    assert found["pools"]["decode"]["replicas"] == 3 and results.completed == 400


def test_a_cancelled_start_is_paid_until_then() -> None:
    planned = Planned(lambda at: 4 if 20 <= at < 40 else 1)
    results = Simulation(scaled(SETUP, planned, startup_s=60.0)).run(steady(100))
    assert max(pool.running for _, pool in planned.seen) == 1
    assert results.summary()["pools"]["decode"]["replica_hours"] == pytest.approx((results.ended_at + 3 * 20) / 3600, rel=0.01)


def test_draining_ends_streams_or_moves_them_at_its_deadline() -> None:
    short = steady(60)
    planned = Planned(lambda at: 2 if at < 30 else 1)
    results = Simulation(scaled(replace(SETUP, decode_replicas=2), planned, 10.0)).run(short)
    assert results.completed == 120 and results.migrated == 0
    long = [(0.1 * k, Request(k, 100, 10_000, OwnText(k))) for k in range(4)]  # more than a minute each
    results = Simulation(scaled(replace(SETUP, decode_replicas=2), planned, 10.0)).run(long)
    assert results.completed == 4 and results.migrated == 2
    assert results.summary()["pools"]["decode"]["replica_hours"] == pytest.approx(
        (results.ended_at + 30 + DRAIN_S) / 3600, abs=2 * LOOK_S / 3600
    )


def test_requests_wait_for_the_first_replica_from_zero() -> None:
    planned = Planned(lambda at: 0 if at < 100 else 1)
    late = [(90.0 + k, Request(k, 100, 20, OwnText(k))) for k in range(5)]
    results = Simulation(scaled(SETUP, planned, startup_s=40.0)).run(late)
    assert results.completed == 5 and results.failed == 0
    assert min(results.ttft_s) > 45 and results.slow == 5
    assert planned.seen[46][1] == Pool(running=0, target=0, ongoing=4, waiting=4)
    never = Planned(lambda _: 0)
    results = Simulation(scaled(SETUP, never, startup_s=40.0)).run(late)
    assert results.failed == 5 and results.ended_at == pytest.approx(94 + REPLICA_WAIT_S)
    assert results.summary()["slo"] == {"ttft_s": 1.0, "itl_s": 0.05, "violations": 5, "share": 1.0}


def test_violations_are_late_first_or_last_tokens() -> None:
    results = Results(Slo(ttft_s=1.0, itl_s=0.1))
    for ttft_s, latency_s, tokens in ((1.0, 1.0, 1), (0.5, 1.9, 10), (1.0, 1.9, 10)):
        results.judge(ttft_s, latency_s, tokens)
    assert results.slow == 0
    for ttft_s, latency_s, tokens in ((1.01, 1.01, 1), (0.5, 1.91, 10)):
        results.judge(ttft_s, latency_s, tokens)
    assert results.slow == 2


@settings(max_examples=8, deadline=None)
@given(
    plan=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=2, max_size=8),
    startup_s=st.sampled_from([0.0, 3.0, 20.0]),
    seed=st.integers(0, 100),
    disaggregated=st.booleans(),
)
def test_no_request_is_lost_whatever_is_decided(
    plan: list[tuple[int, int]], startup_s: float, seed: int, disaggregated: bool
) -> None:
    def at(index: int) -> Callable[[float], int]:
        return lambda now: plan[int(now // 15) % len(plan)][index]

    setup = replace(SETUP, prefill_replicas=2) if disaggregated else SETUP
    planned = Planned(lambda now: max(at(0)(now), int(now > 100)), at(1) if disaggregated else None)
    results = Simulation(scaled(setup, planned, startup_s), seed).run(open_loop("bursts", 5.0, 400, Shape(200, 100), 16, seed))
    assert results.sent == 400 == results.completed + results.failed
    assert results.failed == 0
