"""Saves and stops of the training loop, with a worker that has no engine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.training.checkpoint.saver import Saver
from strata.training.loop import Job, Outcome, Request, Worker, train
from strata.training.metrics.records import Record
from strata.training.schedule.early_stop import EarlyStop
from strata.training.schedule.learning_rate import Plan
from strata.training.watchdog.pulse import Pulse


@dataclass
class FakeWorker:
    """Worker with given losses and gradient norms; all others are finite."""

    job: Job
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    early_stop: EarlyStop = field(default_factory=lambda: EarlyStop(None))
    pulse: Pulse = field(default_factory=Pulse)
    requests: dict[int, Request] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return Plan.of(self.job.train)

    def step(self, step: int, failed: bool = False) -> tuple[float, Request, bool]:
        return self.losses.get(step + 1, 3.0), self.requests.get(step + 1, Request.NONE), failed

    def agree(self, problem: UserError | None) -> UserError | None:
        return problem

    def record(self, step: int, loss: float, seconds: float) -> Record:
        norm = self.norms.get(step, 1.0)
        return Record(step=step, loss=loss, lr=0.1, grad_norm=norm, tokens_per_s=1.0, time=0.0, seconds={"forward": seconds})

    def evaluate(self) -> float:
        return 2.5


@dataclass
class FakeSaver:
    saved: list[tuple[int, float | None, str]] = field(default_factory=list)
    not_finite: int = 0

    def count(self) -> None:
        self.not_finite += 1

    def save(self, step: int, val_loss: float | None, mode: str) -> float:
        self.saved.append((step, val_loss, mode))
        return 0.125


def run(recipe: Recipe, **worker: Any) -> tuple[Any, list[Record], FakeSaver]:
    reported: list[Record] = []
    saver = FakeSaver()
    job = Job(Path("run"), Path("tokens"), recipe.model, recipe.train, recipe.parallel)
    outcome = train(cast(Worker, FakeWorker(job, **worker)), 0, reported.append, cast(Saver, saver), saver.count)
    return outcome, reported, saver


def test_all_saves_but_the_last_are_asynchronous(small_recipe: Recipe) -> None:
    outcome, reported, saver = run(small_recipe)
    assert (outcome.step, outcome.problem) == (8, None)
    assert saver.saved == [(4, 2.5, "async"), (8, 2.5, "sync")]
    assert [record["step"] for record in reported if "checkpoint_stall_s" in record] == [5]
    assert reported[4]["seconds"]["checkpoint"] == 0.125


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ({"losses": {6: float("nan")}}, "The loss is nan at step 6"),
        ({"norms": {6: float("inf")}}, "The gradient norm is inf at step 6"),
    ],
)
def test_non_finite_step_ends_the_run_before_a_save(small_recipe: Recipe, worker: dict[str, Any], message: str) -> None:
    outcome, reported, saver = run(small_recipe, **worker)
    assert outcome.problem is not None and message in outcome.problem.cause
    assert [step for step, *_ in saver.saved] == [4] and reported[-1]["step"] == 5 and saver.not_finite == 1


@pytest.mark.parametrize(
    ("request_", "step", "outcome", "saved"),
    [
        (Request.RESIZE, 3, Outcome(3, resized=True), [(3, None, "sync")]),  # without an evaluation, which would count
        (Request.RESIZE, 4, Outcome(4, resized=True), [(4, 2.5, "sync")]),
        (Request.STOP, 3, Outcome(3, stopped=True), [(3, 2.5, "sync")]),
        (Request.RESIZE, 8, Outcome(8), [(4, 2.5, "async"), (8, 2.5, "sync")]),  # the run has ended
        (Request.STOP, 8, Outcome(8), [(4, 2.5, "async"), (8, 2.5, "sync")]),
    ],
)
def test_request_ends_the_attempt_with_a_checkpoint(
    small_recipe: Recipe, request_: Request, step: int, outcome: Outcome, saved: list[tuple[int, float | None, str]]
) -> None:
    ended, reported, saver = run(small_recipe, requests={step: request_})
    assert (ended, saver.saved, reported[-1]["step"]) == (outcome, saved, step)


def test_early_stop_at_the_step_of_a_resize_ends_the_run(small_recipe: Recipe) -> None:
    ended, _, saver = run(small_recipe, requests={8: Request.RESIZE, 4: Request.RESIZE}, early_stop=EarlyStop(1, 2.5, 0))
    assert ended == Outcome(4) and saver.saved == [(4, 2.5, "sync")]


def test_a_stop_is_stronger_than_a_resize(tmp_path: Path, small_recipe: Recipe) -> None:
    job = Job(tmp_path, tmp_path, small_recipe.model, small_recipe.train, small_recipe.parallel)
    assert job.request() == Request.NONE
    job.resize.touch()
    assert job.request() == Request.RESIZE
    job.stop.touch()
    assert job.request() == Request.STOP
