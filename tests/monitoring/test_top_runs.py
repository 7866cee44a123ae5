import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strata.monitoring.top.runs import FRESH_S, Progress, RunWatch, seconds_per_step
from strata.platform import recipe_file, runs
from strata.platform.runs import Run, State


def training(name: str, steps: int = 100) -> Run:
    return runs.create(name, recipe_file.load("laptop", [f"train.steps={steps}", "train.warmup=1"]), "laptop")


def record(step: int, at: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 9.0 - step / 10, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1000.0, "time": at} | more


def write(run: Run, records: Sequence[dict[str, Any]], mode: str = "a") -> None:
    with run.metrics.open(mode) as file:
        file.writelines(json.dumps(one) + "\n" for one in records)


def only(watch: RunWatch) -> Progress:
    [progress] = watch.poll()
    return progress


def test_no_run_and_none_in_progress() -> None:
    watch = RunWatch()
    assert watch.poll() == []
    for status in ("finished", "interrupted", "failed"):
        training(status).write_state(State(status, 10, 10))
    assert watch.poll() == []


def test_run_before_its_first_step() -> None:
    training("mine", steps=100)
    progress = only(RunWatch())
    assert (progress.name, progress.step, progress.steps, progress.losses) == ("mine", 0, 100, ())
    assert (progress.tokens_per_s, progress.mfu, progress.seconds_left, progress.silent_for) == (None, None, None, None)


def test_progress_from_the_records() -> None:
    run, now = training("mine", steps=100), time.time()
    write(run, [record(step, now + 2 * (step - 10)) for step in range(1, 11)])
    write(run, [record(11, now + 2, val_loss=7.5, mfu=0.4)])
    progress = only(RunWatch())
    assert (progress.step, progress.losses[0], progress.losses[-1]) == (11, 8.9, 7.9)
    assert (progress.validation_losses, progress.mfu, progress.tokens_per_s) == ((7.5,), 0.4, 1000.0)


def test_time_left_uses_steps_since_the_last_start() -> None:
    run, now = training("mine", steps=110), time.time()
    write(run, [record(step, now - 86400 + step) for step in range(1, 6)])  # yesterday, before the run resumed
    write(run, [record(step, now + 60 + 2 * (step - 10)) for step in range(6, 11)])
    assert only(RunWatch()).seconds_left == pytest.approx(200)


def test_step_time_includes_evaluations_and_checkpoints() -> None:
    assert seconds_per_step([(10, 100.0), (11, 101.0), (12, 110.0)]) == 5.0
    assert seconds_per_step([(10, 100.0)]) is None
    assert seconds_per_step([]) is None


def test_reads_incrementally_and_skips_incomplete_lines() -> None:
    run, watch = training("mine"), RunWatch()
    write(run, [record(1, 1.0)])
    assert only(watch).step == 1
    with run.metrics.open("a") as file:
        file.write(json.dumps(record(2, 2.0))[:20])
    assert only(watch).step == 1
    with run.metrics.open("a") as file:
        file.write(json.dumps(record(2, 2.0))[20:] + "\n")
    progress = only(watch)
    assert (progress.step, len(progress.losses)) == (2, 2)


def test_resumed_run_is_read_from_the_start(own_home: Path) -> None:
    run, watch = training("mine"), RunWatch()
    write(run, [record(step, float(step)) for step in range(1, 21)])
    assert only(watch).step == 20
    shorter = own_home / "shorter"
    shorter.write_text("".join(json.dumps(record(step, float(step))) + "\n" for step in range(1, 11)))
    shorter.replace(run.metrics)
    progress = only(watch)
    assert (progress.step, len(progress.losses)) == (10, 10)


def test_killed_run_is_hidden_unless_its_metrics_grow() -> None:
    """A driver on another machine has no visible process, but its metrics grow."""
    run, watch = training("mine"), RunWatch()
    run.write_state(State("running", steps=100, pid=2**22 - 1, pid_created=1.0))
    assert watch.poll() == []
    write(run, [record(1, time.time())])
    assert only(watch).step == 1
    os.utime(run.metrics, (time.time(), time.time() - FRESH_S - 1))
    assert watch.poll() == []


def test_checkpoint_age() -> None:
    run, now = training("mine"), time.time()
    assert only(RunWatch()).checkpoint_age is None
    write(run, [record(1, now - 500), record(2, now - 400, checkpoint_stall_s=0.1), record(3, now - 300)])
    assert only(RunWatch()).checkpoint_age == pytest.approx(400, abs=5), "checkpoints stored elsewhere: from the record"
    for step, age in ((1, 200), (2, 100)):
        manifest = run.checkpoints / f"step-{step:08}" / "manifest-00000.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
        os.utime(manifest, (now - age, now - age))
    assert only(RunWatch()).checkpoint_age == pytest.approx(100, abs=5)


def test_run_removed_between_polls() -> None:
    first, _ = training("a"), training("b")
    watch = RunWatch()
    assert [progress.name for progress in watch.poll()] == ["a", "b"]
    first.remove()
    assert [progress.name for progress in watch.poll()] == ["b"]


def test_nan_loss() -> None:
    run = training("mine")
    write(run, [record(1, 1.0), record(2, 2.0, loss=float("nan"))])
    assert str(only(RunWatch()).losses[-1]) == "nan"
