"""Conservation of requests, tokens and blocks under any load and any failures; hand-over, admission and standby."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.serving.gateway.relay import REPLICA_WAIT_S, TRIES
from strata.serving.routing.policy import NOTICE_S, Rule
from strata.serving.simulation.calibration import Calibration
from strata.serving.simulation.endpoint import Kill, Setup, Simulation
from strata.serving.simulation.engine import EngineSettings
from strata.serving.simulation.generated import Shape, open_loop
from strata.serving.simulation.replica import Role
from strata.serving.simulation.requests import OwnText, Request
from strata.serving.simulation.results import Results

TIMES = Calibration(
    fixed_s=0.01,
    sequence_s=0.001,
    context_token_s=0.00001,
    prompt_token_s=0.0002,
    prompt_pair_s=0.000001,
    request_s=0.012,
    kv_tokens=10**6,
    context=10**6,
)
ENGINE = EngineSettings(blocks=200, block_size=4, max_sequences=8, step_tokens=64)
REMOTE = Rule("always", 1, 2.0, 0.25)
SETUP = Setup(
    times=TIMES,
    decode_replicas=2,
    decode_engine=ENGINE,
    max_queue=10**6,
    context=10**6,
    request_s=0.012,
    prefill_engine=ENGINE,
    handoff_s=0.003,
    transfer_token_s=0.0001,
    recovery_s=5.0,
)


def requests(seed: int, count: int, rate: float = 10.0) -> Iterator[tuple[float, Request]]:
    draw, now = random.Random(seed), 0.0
    for number in range(count):
        now += draw.expovariate(rate)
        yield now, Request(number, draw.randint(1, 200), draw.randint(1, 80), OwnText(number, draw.randrange(2), 0))


def finished(simulation: Simulation, load: Iterator[tuple[float, Request]]) -> Results:
    """Results of a run, with what holds for every run checked."""
    results = simulation.run(load)
    assert results.sent == results.completed + results.rejected + results.too_long + results.failed
    assert len(results.ttft_s) == len(results.latency_s) == len(results.queue_s) == results.completed
    assert all(0 < first <= whole for first, whole in zip(results.ttft_s, results.latency_s, strict=True))
    assert all(waited >= 0 for waited in results.queue_s)
    for replicas in simulation.pools.values():
        for replica in replicas:
            engine = replica.engine
            assert engine.cache.used == engine.cache.references == engine.running == engine.waiting == 0
            assert not replica.busy and not replica.flights and not replica.prefilled and not replica.prefilling
            assert engine.peak_blocks <= engine.cache.capacity
            assert replica.pool_load.here().queued_tokens == replica.remote_prefills == replica._queued_tokens == 0
    assert simulation._admission.admitted_sequences == 0
    return results


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    decode=st.integers(1, 3),
    prefill=st.integers(0, 2),
    when=st.sampled_from(["cheaper", "always"]),
    blocks=st.integers(70, 120),
    rate=st.sampled_from([1.0, 10.0, 100.0]),
    kills=st.lists(st.tuples(st.floats(0, 8), st.booleans(), st.integers(0, 2)), max_size=5),
    recovery=st.sampled_from([0.0, 1.0, 20.0]),
    caching=st.booleans(),
)
def test_nothing_is_lost(
    seed: int,
    decode: int,
    prefill: int,
    when: str,
    blocks: int,
    rate: float,
    kills: list[tuple[float, bool, int]],
    recovery: float,
    caching: bool,
) -> None:
    engine = replace(ENGINE, blocks=blocks, prefix_caching=caching)
    pools: list[Role] = ["decode", "prefill"]
    setup = replace(
        SETUP,
        decode_replicas=decode,
        prefill_replicas=prefill,
        decode_engine=engine,
        prefill_engine=engine,
        rule=Rule(when, 20, 2.0, 0.25),  # type: ignore[arg-type]
        kills=[Kill(at, pools[other], index) for at, other, index in kills],
        recovery_s=recovery,
    )
    results = finished(Simulation(setup, seed), requests(seed, 25, rate))
    offered = [request for _, request in requests(seed, 25, rate)]
    assert results.sent == 25 and results.too_long == results.rejected == 0
    if results.completed == 25:
        assert results.output_tokens == sum(request.output for request in offered)
        assert results.input_tokens == sum(request.prompt for request in offered)
        # Every token but a request's first has a latency, whatever happened in between.
        assert results.itl.weight == sum(request.output - 1 for request in offered)
    assert results.failed == 0 or len(kills) >= TRIES


def test_a_dead_replica_costs_a_pause_and_no_token() -> None:
    request = Request(0, 40, 60, OwnText(0))
    alone = finished(Simulation(SETUP), iter([(0.0, request)]))
    first_s = TIMES.step(0, 0, 40, 40 * 20)
    at = SETUP.request_s + first_s + 20.5 * 0.0114  # after the first token and about 20 steps
    killed = [Simulation(replace(SETUP, kills=[Kill(at, "decode", index)])) for index in range(2)]
    results = sorted((finished(each, iter([(0.0, request)])) for each in killed), key=lambda each: each.migrated)
    assert [each.migrated for each in results] == [0, 1]
    assert results[0].latency_s == alone.latency_s
    moved = results[1]
    done = next(count for count in range(60) if SETUP.request_s + first_s + seconds(40, count + 1) > at)
    assert 10 < done < 30
    # The other replica computes prompt and answer so far, which gives the next token, and goes on.
    resumed = 40 + done + 1
    chunked = TIMES.step(0, 0, resumed, resumed**2 / 2)
    rest = seconds(resumed, 60 - done - 2)
    assert moved.latency_s[0] == pytest.approx(at + SETUP.request_s + chunked + rest)
    assert moved.ttft_s == alone.ttft_s
    assert moved.itl.weight == alone.itl.weight == 59


def seconds(prompt: int, steps: int) -> float:
    """Decode steps of one sequence after a prefill of `prompt` tokens."""
    return sum(TIMES.step(1, prompt + number, 0, 0) for number in range(1, steps + 1))


def test_a_hand_over_takes_prefill_transfer_and_one_token() -> None:
    setup = replace(SETUP, prefill_replicas=1, rule=REMOTE)
    results = finished(Simulation(setup), iter([(0.0, Request(0, 60, 3, OwnText(0)))]))
    prefill_s = TIMES.step(0, 0, 60, 60 * 30)
    transfer_s = setup.handoff_s + 60 * setup.transfer_token_s
    ttft = setup.request_s + prefill_s + transfer_s + TIMES.step(0, 0, 1, 59.5)
    assert results.ttft_s[0] == pytest.approx(ttft)
    assert results.latency_s[0] == pytest.approx(ttft + seconds(60, 2))
    assert results.prefills == {("remote", "always"): 1}


def test_only_uncached_tokens_are_transferred() -> None:
    """The second request of a text finds the first one's blocks, on the prefill replica and on the decode replica."""
    setup = replace(SETUP, decode_replicas=1, prefill_replicas=1, rule=REMOTE)
    text = OwnText(0)
    load = [(0.0, Request(0, 60, 1, text)), (9.0, Request(1, 60, 1, text))]
    results = finished(Simulation(setup), iter(load))
    prefill_s = TIMES.step(0, 0, 4, 4 * 58)
    transfer_s = setup.handoff_s + 4 * setup.transfer_token_s
    assert results.ttft_s[1] == pytest.approx(setup.request_s + prefill_s + transfer_s + TIMES.step(0, 0, 1, 59.5))
    assert results.hit_tokens == 2 * 56


def test_blocks_of_a_dead_prefill_replica_are_computed_again() -> None:
    setup = replace(SETUP, decode_replicas=1, prefill_replicas=1, rule=REMOTE, handoff_s=1.0, recovery_s=60.0)
    results = finished(Simulation(replace(setup, kills=[Kill(0.5, "prefill", 0)])), iter([(0.0, Request(0, 60, 1, OwnText(0)))]))
    assert results.ttft_s[0] == pytest.approx(0.5 + NOTICE_S + TIMES.step(0, 0, 60, 60 * 30))
    assert results.prefills == {("remote", "always"): 1, ("local", "prefill-failed"): 1}


def test_another_prefill_replica_is_tried() -> None:
    setup = replace(SETUP, decode_replicas=1, prefill_replicas=2, rule=REMOTE)
    at = SETUP.request_s + 0.001
    runs = [
        finished(Simulation(replace(setup, kills=[Kill(at, "prefill", index)])), iter([(0.0, Request(0, 60, 1, OwnText(0)))]))
        for index in range(2)
    ]
    assert all(each.prefills == {("remote", "always"): 1} for each in runs)
    late, early = max(each.ttft_s[0] for each in runs), min(each.ttft_s[0] for each in runs)
    assert late - early == pytest.approx(0.001)  # the time until the kill


def test_a_prefill_replica_stands_by() -> None:
    setup = replace(SETUP, decode_replicas=1, prefill_replicas=1, rule=REMOTE, kills=[Kill(1.0, "decode", 0)], recovery_s=50.0)
    results = finished(Simulation(setup), iter([(2.0, Request(0, 60, 2, OwnText(0)))]))
    assert results.prefills == {("local", "no-decode-replica"): 1}
    assert results.latency_s[0] == pytest.approx(SETUP.request_s + TIMES.step(0, 0, 60, 60 * 30) + seconds(60, 1))


def test_requests_wait_for_a_replica_and_finally_fail() -> None:
    load = [(2.0, Request(0, 60, 1, OwnText(0)))]
    setup = replace(SETUP, decode_replicas=1, kills=[Kill(1.0, "decode", 0)])
    results = finished(Simulation(replace(setup, recovery_s=11.0)), iter(load))
    assert results.queue_s[0] == pytest.approx(10.0)
    assert results.ttft_s[0] == pytest.approx(10.0 + SETUP.request_s + TIMES.step(0, 0, 60, 60 * 30))
    results = finished(Simulation(replace(setup, recovery_s=2 * REPLICA_WAIT_S)), iter(load))
    assert results.failed == 1 and results.ended_at == pytest.approx(2.0 + REPLICA_WAIT_S)


def test_admission_rejects_what_exceeds_the_capacity() -> None:
    setup = replace(SETUP, decode_replicas=2, decode_engine=replace(ENGINE, max_sequences=3), max_queue=4)
    load = [(0.001 * number, Request(number, 40, 40, OwnText(number))) for number in range(30)]
    results = finished(Simulation(setup), iter(load))
    assert results.completed == 2 * 3 + 4 and results.rejected == 20


def test_requests_longer_than_the_engine_are_refused() -> None:
    load = [(0.0, Request(0, 700, 100, OwnText(0))), (0.1, Request(1, 700, 101, OwnText(1)))]
    results = finished(Simulation(SETUP), iter(load))  # 200 blocks of 4 tokens
    assert results.completed == 1 and results.too_long == 1
    assert finished(Simulation(replace(SETUP, context=799)), iter(load)).too_long == 2


def test_requests_go_to_the_least_busy_replica() -> None:
    setup = replace(SETUP, decode_replicas=4)
    load = [(0.001 * number, Request(number, 40, 40, OwnText(number))) for number in range(8)]
    simulation = Simulation(setup)
    results = finished(simulation, iter(load))
    assert [replica.engine.queried_tokens for replica in simulation.pools["decode"]] == [80] * 4
    assert results.completed == 8


@pytest.mark.parametrize("prefill", [0, 2])
def test_equal_seeds_give_equal_results(prefill: int) -> None:
    setup = replace(SETUP, prefill_replicas=prefill, rule=Rule("cheaper", 20, 2.0, 0.25), kills=[Kill(3.0, "decode", 1)])
    shape = Shape(60, 30, 0.5, shared=40, openings=2, turns=3, think_s=1.0)

    def summary(seed: int) -> dict[str, object]:
        return finished(Simulation(setup, seed), open_loop("bursts", 8.0, 90, shape, 4, seed)).summary()

    assert summary(1) == summary(1) != summary(2)


def test_conversations_find_their_history() -> None:
    """With one replica and space for all, a turn finds all full blocks of the turn before, answer included."""
    setup = replace(SETUP, decode_replicas=1, decode_engine=replace(ENGINE, blocks=5000))
    shape = Shape(50, 20, 0.0, turns=3, think_s=1.0)
    results = finished(Simulation(setup), open_loop("poisson", 3.0, 30, shape, 4, 0))
    # Turns have 50, 120 and 190 tokens; of the turn before, all but the last generated token have KV entries.
    assert results.queried_tokens == 10 * (50 + 120 + 190)
    assert results.hit_tokens == 10 * (69 // 4 * 4 + 139 // 4 * 4)
