"""Time budget: the number of steps that fit, revisions at the measured pace, and a plan that survives a resume."""

import json
from typing import Any, cast

import pytest

from strata.platform.recipe import TrainSection
from strata.training.metrics.records import Record
from strata.training.schedule import time_budget
from strata.training.schedule.learning_rate import Plan
from strata.training.schedule.time_budget import TimeBudget, fitting, line, recorded, to_record


def section(**changes: Any) -> TrainSection:
    values = {"steps": 1000, "warmup": 20, "lr": 1e-3, "batch": 1, "micro_batch": 1, "time_budget_s": 100}
    return TrainSection.model_validate(values | changes)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Clock that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(time_budget.time, "monotonic", lambda: now[0])
    return now


def run(budget: TimeBudget, plan: Plan, clock: list[float], first: int, pace: Any) -> list[tuple[int, Plan]]:
    """The plans of a run whose step `n` takes `pace(n)` seconds, where they change."""
    changes, step = [], first
    while step < plan.steps:
        step += 1
        clock[0] += pace(step)
        revised = budget.finished(step, plan)
        if revised.steps != plan.steps:
            changes.append((step, revised))
        plan = revised
    return changes


@pytest.mark.parametrize(
    ("step", "left", "pace", "steps"),
    [
        (50, 60.0, 2.0, 80),
        (50, 61.9, 2.0, 80),  # half a step more does not fit
        (50, 10_000.0, 2.0, 1000),  # never more than the recipe's
        (50, 1900.0, 2.0, 1000),
        (50, 1898.0, 2.0, 999),
        (10, 20.0, 2.0, 40),  # at least two warm-ups
        (10, 62.0, 2.0, 41),
        (70, 0.5, 2.0, 71),  # the next step is the last
        (70, -9.0, 2.0, 71),
    ],
)
def test_steps_that_fit(step: int, left: float, pace: float, steps: int) -> None:
    assert fitting(step, left, pace, section()) == steps


def test_fast_machine_trains_all_steps(clock: list[float]) -> None:
    assert run(TimeBudget(section()), Plan(1000, 20), clock, 0, lambda step: 0.09) == []


def test_slow_machine_trains_the_steps_that_fit(clock: list[float]) -> None:
    began = clock[0]
    [(step, plan)] = run(TimeBudget(section()), Plan(1000, 20), clock, 0, lambda step: 0.5)
    assert (step, plan) == (10, Plan(200, 20, 0.0))
    assert clock[0] - began == pytest.approx(100)


def test_a_plan_close_to_the_budget_is_not_revised(clock: list[float]) -> None:
    assert run(TimeBudget(section()), Plan(1000, 20), clock, 0, lambda step: 100 / 951) == []
    assert run(TimeBudget(section()), Plan(1000, 20), clock, 0, lambda step: 100 / 940) != []


def test_a_machine_that_becomes_busy_keeps_the_budget(clock: list[float]) -> None:
    began = clock[0]
    changes = run(TimeBudget(section()), Plan(1000, 20), clock, 0, lambda step: 0.1 if step <= 400 else 0.4)
    assert changes[0][0] > 400 and changes[-1][1].steps == pytest.approx(400 + 60 / 0.4, rel=0.05)
    assert clock[0] - began < 105


def test_a_machine_that_becomes_free_trains_more_steps(clock: list[float]) -> None:
    changes = run(TimeBudget(section()), Plan(1000, 20), clock, 0, lambda step: 0.8 if step <= 60 else 0.1)
    assert changes[0] == (10, Plan(125, 20, 0.0))
    assert changes[-1][1].steps == pytest.approx(60 + (100 - 48) / 0.1, rel=0.06)


def test_a_single_slow_step_at_the_start_does_not_shorten_the_run(clock: list[float]) -> None:
    assert run(TimeBudget(section()), Plan(1000, 20), clock, 0, lambda step: 5.0 if step == 1 else 0.09) == []


def test_a_resumed_run_has_the_time_that_is_left(clock: list[float]) -> None:
    budget = TimeBudget(section(), spent=90.0)
    assert budget.spent == 90.0
    [(step, plan)] = run(budget, Plan(1000, 20), clock, 300, lambda step: 0.1)
    assert step == 310 and plan.steps == pytest.approx(400, abs=1)


def test_plan_and_time_are_those_of_the_record() -> None:
    plan = Plan(310, 120, 1 / 3)
    record = cast(Record, json.loads(json.dumps({"plan": to_record(plan, 61.5, section())})))
    assert recorded(record, section()) == (plan, 61.5)


@pytest.mark.parametrize("changes", [{"steps": 900}, {"time_budget_s": 101}, {"time_budget_s": None}])
def test_another_recipe_makes_a_new_plan(changes: dict[str, Any]) -> None:
    record = cast(Record, {"plan": to_record(Plan(310, 120, 0.5), 61.5, section())})
    train = section(**changes)
    assert recorded(record, train) == (Plan(train.steps, 20), 0.0)


def test_history_without_a_plan_makes_a_new_one() -> None:
    assert recorded(None, section()) == recorded(cast(Record, {}), section()) == (Plan(1000, 20), 0.0)


def test_line_for_the_user() -> None:
    shortened = cast(Record, {"plan": to_record(Plan(310, 120, 0.5), 61.5, section())})
    assert line(shortened, section()) == (
        "This machine is too slow for 1,000 steps in 100 s (train.time_budget_s): it trains about 310."
    )
    assert line(cast(Record, {"plan": to_record(Plan(1000, 20), 1.0, section())}), section()) is None
    assert line(cast(Record, {}), section(time_budget_s=None)) is None
