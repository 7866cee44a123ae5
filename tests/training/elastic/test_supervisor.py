"""Attempts of an elastic run, with stand-in workers and nodes: layouts, counted failures, waits and requests to stop."""

import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.ray_cluster import excluded_nodes
from strata.platform.ray_cluster.excluded_nodes import CORRUPTED, GRADIENTS, SLOW, Excluded, Node
from strata.platform.runs import Run
from strata.training.elastic import resizing, supervisor
from strata.training.elastic.capacity import Survey, fitting
from strata.training.elastic.resizing import Resizing
from strata.training.elastic.supervisor import Supervisor
from strata.training.interrupts import Interrupts
from strata.training.layout import described
from strata.training.loop import Job, Outcome, Request
from strata.training.metrics import records
from strata.training.metrics.records import Record

from ..conftest import SMALL

NODES = ("a", "b", "c")


class WorkerGroupStartupTimeoutError(Exception):
    """Has the name of Ray Train's error."""


@dataclass
class Watch:
    """Stand-in for `CapacityWatch`: the test sets the newest survey."""

    newest: Survey

    def next(self, timeout: float) -> Survey | None:
        return self.newest


@dataclass
class Attempt:
    result: Outcome = field(default_factory=lambda: Outcome(8))
    error: BaseException | None = None

    def outcome(self) -> Outcome:
        if self.error:
            raise self.error
        return self.result


def survey(free: int, usable: tuple[str, ...] = NODES, draining: tuple[str, ...] = ()) -> Survey:
    return Survey(free, frozenset(usable), frozenset(draining))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SETTLE_S", 0.0)


class Bench:
    """An elastic run of 4 to 8 workers. `acts` are its attempts, each called with the job and the resizing of that attempt."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        recipe = recipe_file.load("laptop", [*SMALL, f"data.path={corpus}", "train.batch=24", "parallel.workers=4..8"])
        self.run = runs.create("r", recipe, "test")
        self.job = Job(self.run.path, folder, recipe.model, recipe.train, recipe.parallel)
        self.watch, self.interrupts = Watch(survey(8)), Interrupts()
        self.console = Console(file=io.StringIO(), width=200)
        self.layouts: list[str] = []

    def supervise(self, *acts: Callable[[Job, Resizing], Attempt], wait_s: float = 60.0) -> Outcome:
        turns: Iterator[Callable[[Job, Resizing], Attempt]] = iter(acts)

        def begin(job: Job, resizing: Resizing) -> Attempt:
            self.layouts.append(described(job.parallel))
            job.nodes.write_text("\n".join(NODES) + "\n")
            return next(turns)(job, resizing)

        watch: Any = self.watch
        done = Supervisor(self.job, begin, watch, lambda: None, self.interrupts, self.console, wait_s=wait_s).run()
        assert next(turns, None) is None
        return done

    def step(self, number: int) -> None:
        record = Record(step=number, loss=1.0, lr=0.1, grad_norm=None, tokens_per_s=1.0, time=time.time())
        records.append(Run(self.job.run).metrics, record)

    def output(self) -> str:
        return cast(io.StringIO, self.console.file).getvalue()


@pytest.fixture
def bench(home: Path, corpus: Path) -> Bench:
    return Bench(home, corpus)


def test_lost_node_shrinks_the_run_and_returned_capacity_grows_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GROW_AFTER_S", 0.0)

    def lose_a_node(job: Job, _: Resizing) -> Attempt:
        bench.step(1)
        bench.watch.newest = survey(6, ("a", "b"))
        return Attempt(error=ConnectionError("gloo"))

    def grow(job: Job, resizing: Resizing) -> Attempt:
        bench.step(2)
        bench.watch.newest = survey(0)
        assert resizing.news() == [] and job.request() == Request.NONE
        bench.watch.newest = survey(2)
        assert resizing.news() == ["There is capacity for 8 workers: data 8: a checkpoint is saved for it."]
        assert job.request() == Request.RESIZE and resizing.news() == []
        bench.watch.newest = survey(8)
        return Attempt(Outcome(3, resized=True))

    def end(job: Job, _: Resizing) -> Attempt:
        assert job.request() == Request.NONE  # the request was for the attempt before
        return Attempt(Outcome(8))

    assert bench.supervise(lose_a_node, grow, end) == Outcome(8)
    assert bench.layouts == ["8 workers: data 8", "6 workers: data 6", "8 workers: data 8"]
    assert "Continues on 6 workers: data 6." in bench.output()


def test_capacity_has_to_last_before_the_run_grows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(resizing.time, "monotonic", lambda: now[0])
    bench.watch.newest = survey(6)

    def flicker(job: Job, resizing: Resizing) -> Attempt:
        lines = []
        for free in (2, 0, 2, 2):
            bench.watch.newest = survey(free)
            now[0] += 6.0
            lines += resizing.news()
        assert lines == []
        now[0] += 6.0
        assert len(resizing.news()) == 1
        return Attempt(Outcome(8))

    bench.supervise(flicker)


def test_drain_notice_ends_the_attempt_before_the_node_does(bench: Bench) -> None:
    def drained(job: Job, resizing: Resizing) -> Attempt:
        bench.watch.newest = survey(0, draining=("elsewhere",))
        assert resizing.news() == []
        bench.watch.newest = survey(0, draining=("c",))
        assert "A node of the workers will be taken away" in resizing.news()[0]
        assert job.request() == Request.RESIZE
        bench.watch.newest = survey(4, draining=("c",))
        return Attempt(Outcome(3, resized=True))

    bench.supervise(drained, lambda job, _: Attempt(Outcome(8)))
    assert bench.layouts == ["8 workers: data 8", "4 workers: data 4"]


def test_failures_of_the_run_count_and_lost_nodes_do_not(bench: Bench) -> None:
    def fail(job: Job, _: Resizing) -> Attempt:
        return Attempt(error=ValueError("wrong"))

    def lose(job: Job, _: Resizing) -> Attempt:
        bench.watch.newest = survey(8, ("a", "b"))
        return Attempt(error=ConnectionError("gloo"))

    def found(job: Job, _: Resizing) -> Attempt:
        bench.watch.newest = survey(8)
        return Attempt(error=WorkerGroupStartupTimeoutError())

    with pytest.raises(ValueError, match="wrong"):
        bench.supervise(lose, found, lose, found, fail, lose, found, fail, fail)
    assert "Workers failed (2 of train.max_failures=2)." in bench.output()


def excluded(node: str, kind: str) -> Excluded:
    return Excluded(Node(node, f"host-{node}", "10.0.0.1"), kind, "Its cause.", 0.0)


def test_failure_of_a_node_that_is_excluded_does_not_count(bench: Bench) -> None:
    def corrupted(node: str, kind: str) -> Callable[[Job, Resizing], Attempt]:
        def act(job: Job, _: Resizing) -> Attempt:
            excluded_nodes.add(job.run, excluded(node, kind))
            bench.watch.newest = survey(6)
            return Attempt(error=ValueError("differs"))

        return act

    acts = [corrupted(node, CORRUPTED) for node in ("a", "b", "c")]
    bench.supervise(*acts, lambda job, _: Attempt(Outcome(8)))
    assert bench.layouts[1:] == ["6 workers: data 6"] * 3 and "Workers failed" not in bench.output()
    with pytest.raises(ValueError, match="differs"):
        bench.supervise(*[corrupted(node, GRADIENTS) for node in ("d", "e", "f")])


@pytest.mark.parametrize(("kind", "runs_on_it"), [(SLOW, True), (CORRUPTED, False)])
def test_suspect_node_is_used_only_if_its_results_are_right_and_nothing_else_is_left(
    kind: str, runs_on_it: bool, bench: Bench
) -> None:
    bench.watch.newest = Survey(3, frozenset(NODES), frozenset(), {"c": excluded("c", kind)}, {}, {"a": 2, "b": 1, "c": 1})
    if runs_on_it:
        bench.supervise(lambda job, _: Attempt(Outcome(8)))
        assert bench.layouts == ["4 workers: data 4"]
    else:
        with pytest.raises(UserError, match=r"free resources for 3 workers .* Node host-c"):
            bench.supervise(wait_s=0.3)
    assert "Waiting for capacity" in bench.output()


def test_too_little_capacity_is_waited_for_and_then_an_error(bench: Bench) -> None:
    bench.watch.newest = survey(3)
    with pytest.raises(UserError, match=r"free resources for 3 workers for parallel\.workers=4\.\.8") as error:
        bench.supervise(wait_s=0.3)
    assert "strata train --resume r" in error.value.fix
    assert bench.output().count("Waiting for capacity") == 1


def test_workers_that_never_start_end_the_run_at_the_limit(bench: Bench) -> None:
    def pending(job: Job, _: Resizing) -> Attempt:
        time.sleep(0.2)
        return Attempt(error=WorkerGroupStartupTimeoutError())

    with pytest.raises(UserError, match="No step was finished"):
        bench.supervise(pending, lambda job, _: (setattr(bench.watch, "newest", survey(0)), pending(job, _))[1], wait_s=0.3)


def test_stop_while_waiting_for_capacity_ends_as_interrupted(bench: Bench) -> None:
    bench.step(4)
    bench.watch.newest = survey(0)
    bench.interrupts.stop_requested = True
    assert bench.supervise() == Outcome(0, stopped=True)


def test_stop_during_a_resize_starts_no_other_attempt(bench: Bench) -> None:
    def resized(job: Job, _: Resizing) -> Attempt:
        bench.interrupts.stop_requested = True
        return Attempt(Outcome(3, resized=True))

    assert bench.supervise(resized) == Outcome(3, stopped=True)


@pytest.mark.parametrize(
    ("free", "workers"),
    [({"CPU": 4.0}, 2), ({"CPU": 3.9999}, 1), ({"CPU": 0.3 / 0.1 + 1}, 2), ({}, 0), ({"GPU": 8.0}, 0)],
)
def test_workers_that_fit_on_a_node(free: dict[str, float], workers: int) -> None:
    assert fitting(free, {"CPU": 2.0}) == workers
