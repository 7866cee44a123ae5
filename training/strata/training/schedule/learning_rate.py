"""Learning rate schedule: linear warm-up, then cosine or linear decay, a constant rate, or one before the other (WSD).

A `Plan` says how many steps a run has. A run with a time budget revises it, and decays to the minimum at the new last step.
"""

import math
from dataclasses import dataclass
from typing import Self

from strata.platform.recipe import TrainSection

STABLE = 0.5  # of the steps after warm-up, at the peak rate, with the schedule `wsd`


@dataclass(frozen=True)
class Plan:
    """Number of steps, and the decay's progress as a function of the step: `progress` at step `since`, 1 at the last step."""

    steps: int
    since: int
    progress: float = 0.0

    @classmethod
    def of(cls, train: TrainSection) -> Self:
        return cls(train.steps, train.warmup)

    def at(self, step: int) -> float:
        """Progress of the decay from 0 to 1. A plan without steps after warm-up is complete from its start."""
        share = (step - self.since) / max(1, self.steps - self.since)
        return min(1.0, self.progress + (1 - self.progress) * share)

    def revised(self, step: int, steps: int) -> "Plan":
        """The plan from `step` on with another number of steps. The learning rate does not jump."""
        since = max(step, self.since)
        return Plan(steps, since, self.at(since))


def learning_rate(step: int, train: TrainSection, plan: Plan | None = None) -> float:
    """Learning rate of `step`, counted from 0. A pure function, so checkpoints need no scheduler state."""
    if step < train.warmup:
        return train.lr * (step + 1) / (train.warmup + 1)
    left = _left((plan or Plan.of(train)).at(step), train.schedule)
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)


def _left(done: float, schedule: str) -> float:
    """Share of the way from the minimum to the peak rate, at a progress of the decay."""
    match schedule:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            return 1 - done
        case "wsd":
            return min(1.0, (1 - done) / (1 - STABLE))
        case _:
            return 1.0
