"""Time budget of a run: a machine too slow for all steps of the recipe plans fewer.

Rank 0 measures the pace and revises the plan every few steps, so a machine that becomes busy or free later is followed too. The
plan is part of every record: a resumed run continues with the plan, and the time spent, of the step it resumes from.
"""

import time
from collections import deque
from dataclasses import asdict
from typing import Any

from strata.platform.recipe import TrainSection
from strata.training.metrics.records import Record
from strata.training.schedule.learning_rate import Plan

EVERY = 10  # steps between revisions
RECENT = 20  # steps whose pace counts at least
RECENT_SHARE = 0.2  # of the budget, whose steps count: a machine that stops for a second is not slow
SLACK = 0.05  # a plan this close to the budget is not revised
LEAST = 2  # warm-ups: a shorter run would not learn anything


class TimeBudget:
    def __init__(self, train: TrainSection, spent: float = 0.0) -> None:
        assert train.time_budget_s is not None
        self._train, self._seconds = train, train.time_budget_s
        self._began = time.monotonic() - spent
        self._ends: deque[float] = deque()

    @property
    def spent(self) -> float:
        return time.monotonic() - self._began

    def finished(self, step: int, plan: Plan) -> Plan:
        """The plan after `step` steps. Called once per step."""
        now = time.monotonic()
        self._ends.append(now)
        while len(self._ends) > RECENT + 1 and self._ends[0] < now - RECENT_SHARE * self._seconds:
            self._ends.popleft()
        if step % EVERY or len(self._ends) <= EVERY // 2 or step >= plan.steps:
            return plan
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        steps = fitting(step, self._seconds - self.spent, pace, self._train)
        return plan if abs(steps - plan.steps) <= SLACK * plan.steps else plan.revised(step, steps)


def fitting(step: int, left: float, pace: float, train: TrainSection) -> int:
    """Steps of the whole run if `left` seconds remain after `step` steps, at `pace` seconds per step."""
    fits = step + max(0, int(left / pace))
    return min(train.steps, max(fits, LEAST * train.warmup, step + 1))


def recorded(record: Record | None, train: TrainSection) -> tuple[Plan, float]:
    """The plan and the time spent as of a record. A recipe with other steps or another budget makes a new plan."""
    stored = record.get("plan", {}) if record else {}
    if train.time_budget_s is None or (stored.get("of"), stored.get("budget_s")) != (train.steps, train.time_budget_s):
        return Plan.of(train), 0.0
    return Plan(stored["steps"], stored["since"], stored["progress"]), stored["spent_s"]


def to_record(plan: Plan, spent: float, train: TrainSection) -> dict[str, Any]:
    return asdict(plan) | {"of": train.steps, "budget_s": train.time_budget_s, "spent_s": spent}


def line(record: Record, train: TrainSection) -> str | None:
    """Line for the user about a plan with fewer steps than the recipe."""
    steps = record.get("plan", {}).get("steps", train.steps)
    if steps == train.steps:
        return None
    budget = f"{train.time_budget_s} s (train.time_budget_s)"
    return f"This machine is too slow for {train.steps:,} steps in {budget}: it trains about {steps:,}."
