"""Runs the attempts of an elastic run, one layout after another."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Protocol

from rich.console import Console

from strata.platform.errors import UserError
from strata.platform.hardware.specs import Gpu
from strata.platform.layout_rules import FixedLayout
from strata.platform.ray_cluster import excluded_nodes
from strata.platform.ray_cluster.excluded_nodes import GRADIENTS
from strata.platform.runs import Run
from strata.training import failures
from strata.training.elastic.capacity import CapacityWatch, Survey
from strata.training.elastic.choice import choose
from strata.training.elastic.resizing import GROW_AFTER_S, Resizing, nodes
from strata.training.interrupts import Interrupts
from strata.training.layout import described
from strata.training.loop import Job, Outcome
from strata.training.metrics import records

WAIT_S = 1800.0  # without a finished step, for capacity and for workers that start
SETTLE_S = 4.0  # for which the choice has to stay the same: Ray returns the resources of ended workers one by one
SURVEY_S = 5.0
LOSS_SURVEY_S = 60.0  # to tell a lost node from a failure of the run, on a busy machine too
MOST_GROW_AFTER_S = 600.0


class Attempt(Protocol):
    """An attempt that has ended."""

    error: BaseException | None

    def outcome(self) -> Outcome: ...


class Supervisor:
    """Starts an attempt in the best layout for the capacity, until the run ends. `begin` runs an attempt to its end;
    `require_cluster` raises if the cluster has died."""

    def __init__(
        self,
        job: Job,
        begin: Callable[[Job, Resizing], Attempt],
        watch: CapacityWatch,
        require_cluster: Callable[[], None],
        interrupts: Interrupts,
        console: Console,
        gpu: Gpu | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        self._job, self._begin, self._watch, self._require_cluster = job, begin, watch, require_cluster
        self._interrupts, self._console, self._wait_s = interrupts, console, wait_s
        self._choose = cache(partial(choose, job.model, job.train, job.parallel, gpu=gpu))
        self._progressed = time.monotonic()
        self._grow_after_s = GROW_AFTER_S
        self._failures = 0

    def run(self) -> Outcome:
        started = False
        while (layout := self._await_layout()) is not None:
            self._console.print(f"{'Continues' if started else 'Starts'} on {described(layout.parallel)}.")
            started = True
            if (outcome := self._attempt(layout)) is not None:
                return outcome
        return Outcome(_saved(self._job), stopped=True)

    def _attempt(self, layout: FixedLayout) -> Outcome | None:
        """Outcome of the run, None if it continues with another attempt."""
        job = replace(self._job, train=layout.train, parallel=layout.parallel)
        for path in (job.resize, job.nodes):
            path.unlink(missing_ok=True)
        resizing = Resizing(job, layout, self._choose, lambda: self._watch.newest, self._grow_after_s)
        before, excluded = _last_record_at(job), _excluded(job)
        attempt = self._begin(job, resizing)
        if progressed := _last_record_at(job) > before:
            self._progressed = time.monotonic()
        # A larger layout that does not start is tried less and less often.
        self._grow_after_s = GROW_AFTER_S if progressed else min(2 * self._grow_after_s, MOST_GROW_AFTER_S)
        if attempt.error is None:
            outcome = attempt.outcome()
            if not outcome.resized:
                return outcome
            return Outcome(outcome.step, stopped=True) if self._interrupts.stop_requested else None
        if self._interrupts.stop_requested:
            attempt.outcome()  # raises
        if _excluded(job) <= excluded:  # otherwise the next attempt avoids the node that caused the failure
            self._require_recoverable(attempt, job)
        return None

    def _require_recoverable(self, attempt: Attempt, job: Job) -> None:
        """Raises the attempt's error if it would recur. Lost nodes and workers that could not be placed do not count as failures
        of the run, because their number is no sign of a fault in it; the time without a finished step has a limit instead."""
        assert attempt.error
        survey = self._watch.next(LOSS_SURVEY_S)
        lost = nodes(job) - survey.usable | nodes(job) & survey.draining if survey else frozenset()
        if lost:
            self._console.print(f"{len(lost)} of the workers' nodes {'was' if len(lost) == 1 else 'were'} lost.")
            return
        if failures.not_placed(attempt.error):
            return
        self._failures += 1
        if self._failures > self._job.train.max_failures:
            attempt.outcome()
        self._console.print(f"Workers failed ({self._failures} of train.max_failures={self._job.train.max_failures}).")

    def _await_layout(self) -> FixedLayout | None:
        """The layout of the next attempt, as soon as the capacity has settled. None after a request to stop."""
        most, announced = int(self._job.parallel.workers), False
        chosen, since = None, time.monotonic()
        while not self._interrupts.stop_requested:
            self._require_cluster()
            survey = self._watch.next(SURVEY_S)
            now = time.monotonic()
            free = survey.free if survey else 0
            found = self._choose(free)
            if found is None and survey and announced:
                found = self._choose(_with_suspects(survey))
            if found != chosen:
                chosen, since = found, now
            if found and (found.parallel.workers == most or now - since >= SETTLE_S):
                return found
            if now - self._progressed > self._wait_s:
                raise self._no_capacity(free, survey)
            if found is None and not announced and now - since >= SETTLE_S:
                announced = True
                self._console.print(
                    f"Waiting for capacity, at most {self._wait_s / 60:.0f} minutes: {_short(free)} for"
                    f" parallel.workers={self._job.parallel.workers}.{self._left_out(survey)}"
                )
        return None

    def _left_out(self, survey: Survey | None) -> str:
        return "".join(f" {one.sentence(self._job.run)}" for one in survey.excluded.values()) if survey else ""

    def _no_capacity(self, free: int, survey: Survey | None) -> UserError:
        cause = f"No step was finished within {self._wait_s / 60:.0f} minutes: {_short(free)}"
        return UserError(
            f"{cause} for parallel.workers={self._job.parallel.workers}.{self._left_out(survey)}",
            f"Add nodes or lower the range, and resume with: strata train --resume {self._job.run.name}",
        )


def _with_suspects(survey: Survey) -> int:
    """Workers that fit if all nodes are used but those of corrupted replicas."""
    return survey.free_without([node for node, one in survey.excluded.items() if one.strict])


def _excluded(job: Job) -> set[str]:
    """Nodes without which a failure does not recur. Wrong gradients can be those of bad data, on any node."""
    return {one.node.id for one in excluded_nodes.read(job.run) if one.kind != GRADIENTS}


def _short(free: int) -> str:
    return f"the cluster has free resources for {free} worker{'' if free == 1 else 's'}"


def _last_record_at(job: Job) -> float:
    history = records.read(Run(job.run).metrics)
    return history[-1]["time"] if history else 0.0


def _saved(job: Job) -> int:
    return max(job.begun, records.last_saved(Run(job.run).metrics))
