import math

import pytest

from strata.platform.recipe import TrainSection
from strata.training.schedule.learning_rate import Plan, learning_rate

from ..plain import scheduled_rate

QUARTER = math.sqrt(0.5)  # cos(pi/4)


def section(steps: int, warmup: int, lr: float = 0.8, min_lr_ratio: float = 0.25, schedule: str = "cosine") -> TrainSection:
    values = {"steps": steps, "warmup": warmup, "lr": lr, "min_lr_ratio": min_lr_ratio, "schedule": schedule}
    return TrainSection.model_validate({"batch": 1, "micro_batch": 1} | values)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.2),  # the ramp reaches the peak after 3 steps, in quarters
        (1, 0.4),
        (2, 0.6),
        (3, 0.8),
        (5, 0.5 + 0.3 * QUARTER),  # the cosine falls from 0.8 to 0.2 in 8 steps, around 0.5
        (7, 0.5),
        (9, 0.5 - 0.3 * QUARTER),
        (10, 0.5 + 0.3 * math.cos(7 / 8 * math.pi)),  # the last step is not yet at the minimum
        (11, 0.2),
        (12, 0.2),
        (1000, 0.2),
    ],
)
def test_rate_rises_to_the_peak_and_decays_to_the_minimum(step: int, rate: float) -> None:
    assert learning_rate(step, section(11, 3)) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.2),
        (2, 0.6),
        (3, 0.8),
        (6, 0.8),
        (7, 0.8),  # half of the 8 steps after warm-up are at the peak
        (8, 0.65),  # a quarter of the way from 0.8 to 0.2
        (9, 0.5),
        (10, 0.35),
        (11, 0.2),
        (12, 0.2),
    ],
)
def test_wsd_is_constant_before_it_decays(step: int, rate: float) -> None:
    assert learning_rate(step, section(11, 3, schedule="wsd")) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(("step", "rate"), [(0, 3e-3), (5, 1.65e-3), (10, 3e-4), (11, 3e-4)])
def test_without_warmup_starts_at_the_peak(step: int, rate: float) -> None:
    assert learning_rate(step, section(10, 0, 3e-3, 0.1)) == pytest.approx(rate)


@pytest.mark.parametrize(("step", "rate"), [(2, 0.6), (3, 0.8), (4, 0.2)])
def test_decay_of_a_single_step(step: int, rate: float) -> None:
    assert learning_rate(step, section(4, 3)) == pytest.approx(rate)


@pytest.mark.parametrize(("min_ratio", "last"), [(0.0, 0.0), (1.0, 0.8)])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_minimum_is_a_share_of_the_peak(min_ratio: float, last: float, schedule: str) -> None:
    assert learning_rate(20, section(20, 4, 0.8, min_ratio, schedule)) == pytest.approx(last, abs=1e-12)


@pytest.mark.parametrize(("steps", "warmup"), [(20, 0), (20, 1), (37, 5), (8, 7)])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_every_step_equals_the_plain_schedule(steps: int, warmup: int, schedule: str) -> None:
    train = section(steps, warmup, 0.02, 0.15, schedule)
    for step in range(steps + 3):
        assert learning_rate(step, train) == pytest.approx(scheduled_rate(step, train), rel=1e-12)


def test_revised_plan_continues_where_it_was_and_ends_at_the_new_last_step() -> None:
    first = Plan(steps=100, since=20)
    assert [first.at(step) for step in (20, 60, 100, 101)] == [0.0, 0.5, 1.0, 1.0]
    shorter = first.revised(60, 80)
    assert shorter == Plan(80, 60, 0.5)
    assert [shorter.at(step) for step in (60, 70, 80, 90)] == [0.5, 0.75, 1.0, 1.0]
    longer = shorter.revised(70, 120)
    assert [longer.at(step) for step in (70, 95, 120)] == pytest.approx([0.75, 0.875, 1.0])


def test_plan_revised_during_warm_up_starts_its_decay_after_it() -> None:
    assert Plan(100, 20).revised(10, 60) == Plan(60, 20, 0.0)
    assert Plan(100, 20).revised(20, 60) == Plan(60, 20, 0.0)
    assert Plan(100, 20).revised(21, 60) == Plan(60, 21, 1 / 80)


def test_plan_that_ends_with_warm_up_is_complete() -> None:
    assert Plan(20, 20, 0.25).at(20) == 0.25
    assert Plan(20, 20, 0.25).at(21) == 1.0


def test_rate_follows_the_revised_plan() -> None:
    train = section(100, 20, 0.8, 0.25, "wsd")
    plan = Plan.of(train).revised(60, 80)
    assert Plan.of(train) == Plan(100, 20, 0.0)
    assert learning_rate(60, train, plan) == learning_rate(60, train) == 0.8
    assert learning_rate(70, train, plan) == pytest.approx(0.5)
    assert learning_rate(80, train, plan) == pytest.approx(0.2)
