"""Rates that a replica sustains, against closed forms and against the simulation."""

import math
from dataclasses import replace

import pytest

from strata.serving.scaling import sizing
from strata.serving.scaling.sizing import BUSY, KV_FULL, TAIL, Lengths, Limits, Overhead, Slo
from strata.serving.scaling.step_fit import LinearSteps
from strata.serving.simulation.calibration import Calibration
from strata.serving.simulation.endpoint import Setup, Simulation
from strata.serving.simulation.engine import EngineSettings
from strata.serving.simulation.generated import Shape, open_loop

STEPS = LinearSteps(fixed_s=0.01, stream_s=0.0001, prompt_token_s=0.00002)
LENGTHS = Lengths(prompt=1000, computed=1000, output=100)
LIMITS = Limits(kv_tokens=10**9, max_sequences=10**6, step_tokens=8192)
NONE = Overhead(request_s=0.0)
LAX = Slo(ttft_s=1e6, itl_s=1e6)


def test_inter_token_latency_bounds_the_rate() -> None:
    # s = 0.01 + r (100 * 0.0001 + 1000 * 0.00002) s, so r = (1 - 0.01 / s) / 0.03.
    for itl_s in (0.012, 0.02, 0.05):
        rate = sizing.decode_rate(STEPS, LENGTHS, LIMITS, NONE, Slo(1e6, itl_s))
        assert rate == pytest.approx((1 - 0.01 / itl_s) / 0.03, rel=1e-3)
    # Without prompts, streams alone: r = (1 - 0.01 / s) / 0.01.
    rate = sizing.decode_rate(STEPS, LENGTHS, LIMITS, NONE, Slo(1e6, 0.02), prefills=False)
    assert rate == pytest.approx(50.0, rel=1e-3)


def test_contexts_and_places_bound_the_rate() -> None:
    def streams(rate: float) -> float:
        return rate * 100 * 0.01 / (1 - 0.03 * rate)

    few = sizing.decode_rate(STEPS, LENGTHS, replace(LIMITS, max_sequences=20), NONE, LAX)
    assert streams(few) == pytest.approx(20, rel=1e-3)
    small = sizing.decode_rate(STEPS, LENGTHS, replace(LIMITS, kv_tokens=10_500), NONE, LAX)
    assert streams(small) * 1050 == pytest.approx(KV_FULL * 10_500, rel=1e-3)


def test_time_to_first_token_bounds_a_prefill_engine() -> None:
    each_s = 1000 * (0.01 + 8192 * 0.00002) / 8192
    own_s = 0.01 + 1000 * 0.00002
    overhead = Overhead(request_s=0.02, handoff_s=0.005, transfer_token_s=1e-6)
    slo = Slo(ttft_s=0.2, itl_s=0.03)
    rate = sizing.prefill_rate(STEPS, LENGTHS, LIMITS, overhead, slo)
    busy = rate * each_s
    predicted = 0.02 + TAIL * (busy / (1 - busy) * each_s + own_s) + 0.005 + 0.001 + 0.03
    assert predicted == pytest.approx(0.2, rel=1e-3) and busy < BUSY
    assert sizing.prefill_rate(STEPS, LENGTHS, LIMITS, overhead, LAX) * each_s == pytest.approx(BUSY, rel=1e-3)


def test_a_bound_that_no_number_of_replicas_meets_is_left_out() -> None:
    unmet = Slo(ttft_s=0.001, itl_s=0.02)
    assert sizing.decode_rate(STEPS, LENGTHS, LIMITS, NONE, unmet) == pytest.approx(
        sizing.decode_rate(STEPS, LENGTHS, LIMITS, NONE, Slo(1e6, 0.02))
    )
    assert sizing.decode_rate(STEPS, LENGTHS, LIMITS, NONE, Slo(1e6, 0.005)) > 1


def test_lengths_are_rounded_by_at_most_two_percent() -> None:
    for tokens in (1.0, 17.0, 999.0, 123_456.0):
        rounded = Lengths(tokens, tokens / 2, tokens).rounded()
        assert abs(math.log(rounded.prompt / tokens)) < 0.016 and rounded.prompt == rounded.output
    assert Lengths(1000, 500, 300).rounded() == Lengths(1001, 501, 301).rounded()
    assert Lengths(5, 0.0, 0.0).rounded().computed == 0.0


@pytest.mark.parametrize("itl_s", [0.02, 0.04])
def test_simulated_engine_has_the_predicted_latency(itl_s: float) -> None:
    times = Calibration(
        fixed_s=0.01, sequence_s=1e-4, context_token_s=1e-8, prompt_token_s=2e-5, prompt_pair_s=1e-10,
        request_s=0.0, kv_tokens=10**6, context=10**5,
    )  # fmt: skip
    limits = Limits(10**6, 256, 8192)
    rate = sizing.decode_rate(times, Lengths(500, 500, 100), limits, NONE, Slo(1e6, itl_s))
    engine = EngineSettings(blocks=10**6 // 16, block_size=16, max_sequences=256, step_tokens=8192)
    setup = Setup(times, 1, engine, 10**4, 10**5, request_s=0.0)
    found = Simulation(setup).run(open_loop("poisson", rate, 2500, Shape(500, 100), 16, 0)).summary()
    assert found["itl_s"]["mean"] == pytest.approx(itl_s, rel=0.12)
