"""The same load in the simulation: prompts that share blocks, closed loops, arrivals, and the queue of the front end."""

from dataclasses import replace

import pytest

from strata.serving.bench.clients.load import Level
from strata.serving.bench.clients.workloads import Workload
from strata.serving.calibration.replay import Engines, requests, setup, simulate
from strata.serving.simulation.calibration import Calibration
from strata.serving.simulation.endpoint import Simulation
from strata.serving.simulation.front_end import FrontEnd

TIMES = Calibration(
    fixed_s=0.01, sequence_s=1e-4, context_token_s=0, prompt_token_s=1e-5, prompt_pair_s=0, request_s=0.002,
    kv_tokens=100_000, context=4096,
)  # fmt: skip
ENGINES = Engines(block_size=16, max_sequences=64, step_tokens=2048)
UNIFORM = Workload("uniform", 64, input=64, output=20, long_input=0, long_share=0, turns=1)
TURNS = Workload("multiturn", 64, input=64, output=16, long_input=0, long_share=0, turns=3)


def test_turns_find_the_prompts_before_them() -> None:
    """A later prompt has other tokens in the place of the answer, as in the benchmark: its cached prefix ends there."""
    found = Simulation(setup(TIMES, ENGINES)).run(requests(TURNS, Level(4, concurrency=1), 0, 16)).summary()
    assert found["requests"]["completed"] == 12
    # Prompts of 64, 144 and 224 tokens; the second finds the first, and the third the second.
    assert found["prefix_hit_rate"] == pytest.approx((64 + 144) / (64 + 144 + 224))
    alone = Simulation(setup(TIMES, ENGINES)).run(requests(UNIFORM, Level(8, concurrency=2), 0, 16)).summary()
    assert alone["prefix_hit_rate"] == 0 and alone["requests"]["completed"] == 8


def test_loads_repeat_and_have_their_concurrency_and_rate() -> None:
    closed = simulate(TIMES, ENGINES, UNIFORM, Level(40, concurrency=4), 1)
    assert closed == simulate(TIMES, ENGINES, UNIFORM, Level(40, concurrency=4), 1)
    each_s = closed.ttft_p50 + 19 * closed.itl_mean
    assert closed.requests_per_s == pytest.approx(4 / each_s, rel=0.05)
    opened = simulate(TIMES, ENGINES, UNIFORM, Level(300, rate=5.0), 1)
    assert opened.requests_per_s == pytest.approx(5.0, rel=0.15)


def test_saturated_front_end_bounds_throughput_and_delays_first_tokens() -> None:
    level = Level(160, concurrency=32)
    free = simulate(TIMES, ENGINES, UNIFORM, level, 0)
    slow = simulate(TIMES.model_copy(update={"front_token_s": 0.001}), ENGINES, UNIFORM, level, 0)
    assert free.itl_mean == pytest.approx(0.01 + 32e-4, rel=0.02) and free.tokens_per_s > 2000
    assert slow.tokens_per_s <= 1000 and slow.tokens_per_s == pytest.approx(1000, rel=0.1)
    assert slow.itl_mean == pytest.approx(0.032, rel=0.05)
    # At other lengths the streams are not in step, and the engine runs ahead: first tokens wait behind the tokens of many steps.
    mixed = replace(UNIFORM, name="mixed", long_input=512, long_share=0.5)
    late = simulate(TIMES.model_copy(update={"front_token_s": 0.001}), ENGINES, mixed, level, 0)
    assert late.ttft_p50 > simulate(TIMES, ENGINES, mixed, level, 0).ttft_p50 + 32 * 0.001


def test_requests_queue_in_the_front_end() -> None:
    times = TIMES.model_copy(update={"front_request_s": 0.01})
    one = simulate(times, ENGINES, UNIFORM, Level(1, concurrency=1), 0)
    assert one.ttft_p50 == pytest.approx(simulate(TIMES, ENGINES, UNIFORM, Level(1, concurrency=1), 0).ttft_p50 + 0.01)
    many = simulate(times, replace(ENGINES, prefix_caching=False), UNIFORM, Level(16, concurrency=16), 0)
    assert many.ttft_p90 is not None and many.ttft_p90 > 0.14


def test_the_front_end_takes_turns_between_requests() -> None:
    """Those that arrive together are parsed together; one that arrives later lengthens the rest of the others."""
    front = FrontEnd(0.01, 0.0)
    first, second = front.accepts(5.0, 0), front.accepts(5.0, 0)
    assert front.parsed_at(5.0, first) == front.parsed_at(5.0, second) == pytest.approx(5.02)
    third = front.accepts(5.01, 0)  # the others have half of their work
    assert front.parsed_at(5.01, first) == front.parsed_at(5.01, second) == pytest.approx(5.025)
    assert front.parsed_at(5.01, third) == pytest.approx(5.03)
    assert front.parsed_at(5.026, first) == 5.026 and front.parsed_at(5.026, third) == pytest.approx(5.03)
    assert front.parsed_at(6.0, front.accepts(6.0, 0)) == pytest.approx(6.01)


def test_streams_that_begin_together_stay_in_step() -> None:
    """Requests of a closed loop arrive together, and no prompt is beside another's tokens."""
    times = TIMES.model_copy(update={"front_request_s": 0.01, "prompt_beside_s": 1.0})
    found = simulate(times, replace(ENGINES, prefix_caching=False), UNIFORM, Level(32, concurrency=8), 0)
    assert found.ttft_p50 == pytest.approx(found.ttft_p90, rel=0.01) and found.ttft_p50 > 8 * 0.01
    assert found.itl_mean < 0.02


def test_a_spread_of_requests_leaves_their_median() -> None:
    same = simulate(TIMES, ENGINES, UNIFORM, Level(200, concurrency=1), 0)
    spread = simulate(TIMES.model_copy(update={"request_spread": 0.5}), ENGINES, UNIFORM, Level(200, concurrency=1), 0)
    assert spread.ttft_p50 == pytest.approx(same.ttft_p50, rel=0.05)
    assert spread.ttft_p90 is not None and same.ttft_p90 is not None
    assert spread.ttft_p90 - same.ttft_p90 == pytest.approx(TIMES.request_s * (1.9 - 1), rel=0.3)  # exp(1.28 * 0.5)


def test_tokens_of_a_run_are_counted_once() -> None:
    """A run of steps that a new request interrupts is counted up to then, and its rest at its end."""
    whole, parts = FrontEnd(0.0, 0.02), FrontEnd(0.0, 0.02)
    seconds = [0.0, 0.01, 0.02, 0.03, 0.04].__getitem__
    whole.stepped(5.0, seconds, 4, 1)
    for steps in (1, 1, 3, 4):
        parts.stepped(5.0, seconds, steps, 1)
    assert whole.delivers(5.04) == pytest.approx(parts.delivers(5.04)) == pytest.approx(5.01 + 4 * 0.02)
    idle = FrontEnd(0.0, 0.004)
    idle.stepped(5.0, seconds, 4, 1)
    assert idle.delivers(5.04) == pytest.approx(5.044)


def test_clients_have_their_own_share_of_a_closed_loop() -> None:
    """Three clients of four slots: the one with two slots ends first, and throughput falls below that of shared work."""
    level = Level(24, concurrency=4)
    shared = simulate(TIMES, ENGINES, UNIFORM, level, 0)
    apart = simulate(TIMES, ENGINES, UNIFORM, level, 0, clients=3)
    assert [level.slots(client, 3) for client in range(3)] == [2, 1, 1]
    assert sorted(number for client in range(3) for number in level.numbers(client, 3)) == list(range(24))
    assert apart.requests_per_s < 0.9 * shared.requests_per_s
    assert simulate(TIMES, ENGINES, UNIFORM, level, 0, clients=1) == shared
