"""A simulated endpoint with known times is measured, fitted, and compared under other loads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from strata.serving.calibration import fit, loads
from strata.serving.calibration.figures import BARS
from strata.serving.calibration.fit import Point
from strata.serving.calibration.loads import Load, Sizes
from strata.serving.calibration.replay import Engines, simulate
from strata.serving.simulation.calibration import Calibration

SIZES = Sizes(context=512, concurrency=8, vocab=64, waves=3)
ENGINES = Engines(block_size=16, max_sequences=32, step_tokens=1024)
# An engine whose front end takes a good part of the time.
TRUE = Calibration(
    fixed_s=0.004, sequence_s=3e-4, context_token_s=2e-7, prompt_step_s=0.002, prompt_s=0.001, prompt_token_s=5e-5,
    prompt_pair_s=2e-8, request_s=0.003, front_request_s=0.002, front_token_s=4e-4, kv_tokens=100_000, context=2048,
)  # fmt: skip

# The same on cores that it shares with clients and other programs.
SHARED = TRUE.model_copy(update={"prompt_beside_s": 0.001, "request_spread": 0.3})


def measured(wanted: Sequence[Load], rates: Mapping[str, float], true: Calibration = TRUE) -> list[Point]:
    """Points of a known endpoint."""
    found: list[Point] = []
    known = dict(rates)
    for seed, each in enumerate(wanted):
        level = each.level(known)
        figures = simulate(true, ENGINES, each.workload, level, seed)
        known[each.name] = figures.requests_per_s
        found.append(Point(each.name, each.workload, (level,), (seed,), (figures,)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("true", [TRUE, SHARED], ids=["alone", "shared"])
def test_fitted_endpoint_is_within_ten_percent_under_other_loads(true: Calibration) -> None:
    fitted_loads = measured(loads.calibration(SIZES), {}, true)
    rates = {point.name: point.figures.requests_per_s for point in fitted_loads}
    other_loads = measured(loads.validation(SIZES), rates, true)
    starts = fit.guesses(fitted_loads, true.kv_tokens, true.context, ENGINES)
    found = fit.fit(starts, ENGINES, fitted_loads, lambda _: None)
    for point in other_loads:
        errors = fit.errors(point.figures, point.simulated(found, ENGINES))
        assert all(abs(errors[name]) < 0.1 for name in BARS), (point.name, errors)
    assert found.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.3)
    assert (found.kv_tokens, found.block_size, found.max_sequences) == (100_000, 16, 32)


def test_errors_leave_out_figures_that_a_record_lacks() -> None:
    point = measured(loads.calibration(SIZES)[:1], {})[0]
    assert set(fit.errors(point.figures, point.figures).values()) == {0.0}
    lacking = replace(point.figures, ttft_p90=None)
    assert "ttft_p90" not in fit.errors(lacking, point.figures)
