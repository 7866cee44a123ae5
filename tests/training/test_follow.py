"""Progress display of the driver, with stand-in workers that write the files of real ones."""

import errno
import io
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from strata.platform import runs
from strata.platform.recipe import Recipe
from strata.platform.runs import Run
from strata.training import workers
from strata.training.evaluation import samples
from strata.training.interrupts import Interrupts
from strata.training.loop import Job
from strata.training.metrics import progress, records
from strata.training.metrics.progress import TrainingProgress
from strata.training.metrics.records import Record


def record(step: int, **more: Any) -> Record:
    return cast(Record, Record(step=step, loss=1.0 / step, lr=0.1, grad_norm=None, tokens_per_s=1.0, time=0.0) | more)


class Workers:
    """Stand-in for the thread of the workers. Each call of `join` runs one act; after the last one the workers have ended."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        self._acts = list(acts)

    def join(self, timeout: float) -> None:
        self._acts.pop(0)()

    def is_alive(self) -> bool:
        return bool(self._acts)


@pytest.fixture
def job(home: Path, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(workers, "STATE_EVERY_S", 0.0)
    run = runs.create("r", small_recipe, "test")
    return Job(run.path, home, small_recipe.model, small_recipe.train, small_recipe.parallel, begun=4, stored=4)


def follow(job: Job, *acts: Callable[[], object], death: Callable[[], str | None] = lambda: None) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    watch: Any = SimpleNamespace(death=death, news=lambda: [])
    watchdog: Any = SimpleNamespace(news=lambda: [])
    fit: Any = Workers(*acts)
    with TrainingProgress(console, 8) as shown:
        workers.follow(fit, job, Interrupts(), shown, console, watch, watchdog)
    output = cast(io.StringIO, console.file).getvalue()
    return [line.strip().split("  ")[0].removesuffix("/8") for line in output.splitlines()]


def begin(job: Job, step: int) -> None:
    """Starts the workers like rank 0: truncates the history to the step, then records the start."""
    records.cut(Run(job.run).metrics, step)
    with job.starts.open("a") as file:
        file.write(f"{step} checkpoint\n")


def test_old_steps_are_not_shown_again(job: Job) -> None:
    history = Run(job.run).metrics
    records.append(history, *(record(step, checkpoint_step=2) for step in range(1, 5)))
    shown = follow(
        job,
        lambda: None,  # still starting
        lambda: begin(job, 4),
        lambda: records.append(history, record(5), record(6, checkpoint_step=4)),
        lambda: (begin(job, 4), records.append(history, record(5))),
        lambda: records.append(history, record(6)),
    )
    lost = "Workers died; Ray restarted all of them. Continued from step 4, from the checkpoint of step 4."
    assert shown == ["step 5", "step 6", "step 5", lost, "step 6"]
    state = Run(job.run).state()
    assert (state.step, state.steps, state.saved, state.status) == (6, 8, 4, "running")


def test_samples_follow_their_evaluation(job: Job) -> None:
    run = Run(job.run)
    begin(job, 4)

    def evaluate(step: int) -> None:
        records.append(samples.path(run), *samples.lines(step, {"a [b]": f"\n{step}", "c": "d"}))
        records.append(run.metrics, record(step, val_loss=1.0))

    job = replace(job, prompts=samples.Prompts(("a [b]", "c"), ((1,), (2,)), 4, (0,), Path()))
    shown = follow(job, lambda: evaluate(6), lambda: records.append(run.metrics, record(7)), lambda: evaluate(8))
    assert shown == [
        *("step 6", r"'a [b]' continues '\n6'", "'c' continues 'd'"),
        *("step 7", "step 8", r"'a [b]' continues '\n8'", "'c' continues 'd'"),
    ]


def test_long_phase_before_the_first_step_is_shown(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "STILL_STARTING_S", 0.05)
    history = Run(job.run).metrics
    shown = follow(
        job,
        lambda: job.phase.write_text("reference model: 0 of 9 rows (train)"),
        lambda: (time.sleep(0.1), job.phase.write_text("reference model: 4 of 9 rows (train)")),
        lambda: (job.phase.unlink(), begin(job, 4)),
        lambda: records.append(history, record(5)),
    )
    assert shown == ["reference model: 0 of 9 rows (train)", "reference model: 4 of 9 rows (train)", "step 5"]


def test_failed_state_write_is_reported_once_and_training_continues(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runs, "write_atomic", full)
    begin(job, 4)
    history = Run(job.run).metrics
    shown = follow(job, lambda: records.append(history, record(5)), lambda: records.append(history, record(6)))
    error = f"{job.run}/state.json cannot be written (No space left on device); training continues."
    assert shown == ["step 5", error, "step 6"]


def test_follow_ends_when_the_cluster_dies(job: Job) -> None:
    deaths = iter([None, "Ray's node service (raylet) on this machine has died."])
    acts = [lambda: None] * 1000
    assert follow(job, *acts, death=lambda: next(deaths)) == []
