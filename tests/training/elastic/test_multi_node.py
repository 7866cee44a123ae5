"""An elastic run over several Ray nodes: a lost node, returned capacity, a drain notice, and a kill of the driver.

One run goes through all of it, on nodes with their own raylets and network namespaces. Its losses are compared with those of a
run in one process that nothing disturbs.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from strata.platform.runs import Run
from strata.training.logs import attempts
from strata.training.metrics import records
from strata.training.metrics.records import Record

from ..conftest import SMALL, strata_process, write_corpus
from .machines import Machines

pytestmark = [pytest.mark.slow, pytest.mark.rotation, pytest.mark.long, pytest.mark.timeout(3600)]

STEPS, TOLERANCE, TIMEOUT_S = 4000, 1e-4, 600.0
CPUS = {"a": 4, "b": 2, "c": 2}  # of the nodes
MOST, LEFT = 8, 6  # workers on all nodes, and without one of the smaller ones
RANGE = "4..8"
SETTINGS = (
    *SMALL,
    "train.time_budget_s=null",
    "train.batch=24",
    "train.micro_batch=2",
    "train.checkpoint_every=50",
    "train.eval_every=1000",
    "train.max_failures=0",  # lost nodes do not count
    "parallel.zero=1",
)


@dataclass(frozen=True)
class Story:
    """The run, its output, and the steps at which things happened to it."""

    run: Run
    undisturbed: Run
    output: str
    history: list[Record]

    def stretches(self) -> list[tuple[str, list[int]]]:
        """Consecutive steps in one layout."""
        groups = groupby(self.history, key=lambda record: record["layout"])
        return [(layout, [record["step"] for record in found]) for layout, found in groups]


class Driver:
    """A training command, whose run the test disturbs."""

    def __init__(self, home: Path, run: Run, *words: str) -> None:
        self.run, self.output = run, ""
        self.process: subprocess.Popen[str] = strata_process(home, "train", *words)

    def last(self) -> Record | None:
        history = records.read(self.run.metrics)
        return history[-1] if history else None

    def until(self, condition: Callable[[Record], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while (record := self.last()) is None or not condition(record):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"waited too long; the last step is {record}"
            time.sleep(0.2)

    def until_on(self, workers: int, steps: int = 3) -> None:
        """Waits for so many more steps on this number of workers."""
        self.until(lambda record: record["workers"] == workers)
        first = self.last()
        assert first is not None
        self.until(lambda record: record["workers"] == workers and record["step"] >= first["step"] + steps)

    def kill(self) -> str:
        os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.communicate()[0]

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()

    def stop(self) -> str:
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode in (0, 130), output
        return output


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    home, corpus = tmp_path_factory.mktemp("home"), write_corpus(tmp_path_factory.mktemp("corpus"))
    settings = [*SETTINGS, f"data.path={corpus}", f"train.steps={STEPS}"]
    run, undisturbed = (Run(home / "runs" / name) for name in ("elastic", "undisturbed"))
    with ExitStack() as drivers, Machines() as machines, pytest.MonkeyPatch.context() as patch:
        for name, cpus in CPUS.items():
            machines.add(name, cpus)
        for key, value in machines.environment.items():
            patch.setenv(key, value)
        driver = Driver(home, run, "--run", run.name, *settings, f"parallel.workers={RANGE}")
        drivers.callback(driver.end)
        driver.until_on(MOST)
        machines.kill("c")
        driver.until_on(LEFT)
        machines.add("d", CPUS["c"])
        driver.until_on(MOST)
        machines.drain("b", deadline_s=600)
        driver.until_on(LEFT)
        output = driver.kill()
        driver = Driver(home, run, "--resume", run.name)
        drivers.callback(driver.end)
        driver.until_on(LEFT)
        output += driver.stop()
        reached = records.read(run.metrics)[-1]["step"]
        for key in machines.environment:
            patch.delenv(key)
        fixed = Driver(home, undisturbed, "--run", undisturbed.name, *settings, "parallel.workers=1")
        drivers.callback(fixed.end)
        fixed.until(lambda record: record["step"] >= reached)
        fixed.stop()
    yield Story(run, undisturbed, output, records.read(run.metrics))


def test_each_loss_is_that_of_the_undisturbed_run(story: Story) -> None:
    expected = {record["step"]: record["loss"] for record in records.read(story.undisturbed.metrics)}
    for record in story.history:
        assert record["loss"] == pytest.approx(expected[record["step"]], abs=TOLERANCE), record["step"]


def test_every_step_is_recorded_once_and_in_order(story: Story) -> None:
    assert [record["step"] for record in story.history] == list(range(1, len(story.history) + 1))


def test_the_run_went_through_all_layouts(story: Story) -> None:
    layouts = [layout for layout, _ in story.stretches()]
    assert layouts == [f"{size} workers: data {size}" for size in (MOST, LEFT, MOST, LEFT)]


def test_the_console_and_the_state_name_the_layouts(story: Story) -> None:
    sizes = [int(size) for size in re.findall(r"(?:Starts|Continues) on (\d) workers", story.output)]
    assert sizes[:4] == [MOST, LEFT, MOST, LEFT] and set(sizes[4:]) == {LEFT}
    assert "will be taken away" in story.output and f"There is capacity for {MOST} workers" in story.output
    assert "Traceback" not in story.output
    assert story.run.state().status == "interrupted" and story.run.state().layout == f"{LEFT} workers: data {LEFT}"


def test_growth_and_a_drain_notice_lose_no_step(story: Story) -> None:
    """Both save a checkpoint first. Only the steps after the last checkpoint before the lost node ran twice."""
    grown, drained = (steps[0] for _, steps in story.stretches()[2:])
    saved = {record["checkpoint_step"] for record in story.history if "checkpoint_step" in record}
    assert {grown - 1, drained - 1} <= saved


def test_every_start_has_the_logs_of_its_ranks(story: Story) -> None:
    found = [len(list(folder.glob("rank-*.log"))) for folder in attempts.every(attempts.folder(story.run)).values()]
    assert found[:4] == [MOST, LEFT, MOST, LEFT] and set(found[4:]) == {LEFT}
