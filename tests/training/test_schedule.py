import math

import pytest

from strata.training.schedule import learning_rate

from .plain import scheduled_rate

QUARTER = math.sqrt(0.5)  # cos(pi/4)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 2.0),  # the ramp reaches the peak after 3 steps, in quarters
        (1, 4.0),
        (2, 6.0),
        (3, 8.0),
        (5, 5 + 3 * QUARTER),  # the cosine falls from 8 to 2 in 8 steps, around 5
        (7, 5.0),
        (9, 5 - 3 * QUARTER),
        (10, 5 + 3 * math.cos(7 / 8 * math.pi)),  # the last step is not yet at the minimum
        (11, 2.0),
        (12, 2.0),
        (1000, 2.0),
    ],
)
def test_rate_rises_to_the_peak_and_decays_to_the_minimum(step: int, rate: float) -> None:
    assert learning_rate(step, steps=11, peak=8.0, warmup=3, min_ratio=0.25) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(("step", "rate"), [(0, 3e-3), (5, 1.65e-3), (10, 3e-4), (11, 3e-4)])
def test_without_warmup_starts_at_the_peak(step: int, rate: float) -> None:
    assert learning_rate(step, 10, 3e-3, 0, 0.1) == pytest.approx(rate)


@pytest.mark.parametrize(("step", "rate"), [(2, 6.0), (3, 8.0), (4, 2.0)])
def test_decay_of_a_single_step(step: int, rate: float) -> None:
    assert learning_rate(step, 4, 8.0, 3, 0.25) == pytest.approx(rate)


def test_warmup_as_long_as_the_run_has_no_decay() -> None:
    assert [learning_rate(step, 3, 8.0, 3, 0.25) for step in range(4)] == pytest.approx([2.0, 4.0, 6.0, 8.0])


@pytest.mark.parametrize(("min_ratio", "last"), [(0.0, 0.0), (1.0, 8.0)])
def test_minimum_is_a_share_of_the_peak(min_ratio: float, last: float) -> None:
    assert learning_rate(20, 20, 8.0, 4, min_ratio) == pytest.approx(last, abs=1e-12)


@pytest.mark.parametrize(("steps", "warmup"), [(20, 0), (20, 1), (37, 5), (8, 7)])
def test_every_step_equals_the_plain_schedule(steps: int, warmup: int) -> None:
    for step in range(steps + 3):
        expected = scheduled_rate(step, steps, 0.02, warmup, 0.15)
        assert learning_rate(step, steps, 0.02, warmup, 0.15) == pytest.approx(expected, rel=1e-12)
