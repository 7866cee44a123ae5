"""The driver's view of all ranks: names hangs and stragglers, and has ranks at fault killed, so that Ray restarts the workers."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from strata.platform import metrics
from strata.platform.recipe import ParallelSection, WatchdogSection
from strata.training.layout import place
from strata.training.watchdog import diagnosis, evidence, hang_report, monitor
from strata.training.watchdog.deadlines import Deadline
from strata.training.watchdog.diagnosis import Diagnosis
from strata.training.watchdog.evidence import Evidence
from strata.training.watchdog.stragglers import Stragglers

LOOK_EVERY_S = 1.0
SPARE_EVERY_S = 60.0  # between looks for a spare for a rank that stays slow
SETTLE_S = 3.0  # from the first death to the report: the others' last words arrive


class Suspects(Protocol):
    """Excludes nodes from the next start of the workers. Both methods return false if the run needs the node."""

    def hung(self, ranks: Sequence[Evidence], node: str) -> bool: ...

    def slow(self, ranks: Sequence[Evidence], node: str, sentence: str) -> bool: ...


class Watch:
    """Watches a run's workers. Without a section it does nothing, and the workers publish nothing."""

    def __init__(
        self,
        run: Path,
        section: WatchdogSection | None,
        parallel: ParallelSection,
        clock: Callable[[], float] = time.monotonic,
        suspects: Suspects | None = None,
    ) -> None:
        self._run, self._section, self._parallel, self._clock, self._suspects = run, section, parallel, clock, suspects
        self._folder = monitor.folder(run)
        self._due, self._session, self._reported = 0.0, "", ""
        self._died: float | None = None
        shutil.rmtree(self._folder, ignore_errors=True)
        if section is None:
            return
        self._folder.mkdir(parents=True)
        self._begin(clock())
        self._faults, self._slowness = _exported(run.name)

    def stop(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def news(self) -> list[str]:
        """Sentences about hangs, deaths and stragglers since the last call."""
        now = self._clock()
        if self._section is None or now < self._due:
            return []
        self._due = now + LOOK_EVERY_S
        ranks = evidence.read(self._folder)
        if not ranks:
            return []
        if ranks[0].session != self._session:
            self._session = ranks[0].session
            self._begin(now)
        self._deadline.seen(ranks, now)
        if self._reported == self._session:
            return []
        if found := self._found(ranks, now):
            self._reported = self._session
            return self._report(ranks, found, self._deadline.silent_s(now))
        return self._slow_ranks(ranks, now)

    def _begin(self, now: float) -> None:
        assert self._section
        self._deadline, self._died = Deadline(self._section.hang_s, now), None
        self._spare_due = now + SPARE_EVERY_S
        self._stragglers = Stragglers(self._section.straggler, lambda rank: place(rank, self._parallel).stage)

    def _found(self, ranks: Sequence[Evidence], now: float) -> Diagnosis | None:
        if dead := diagnosis.dead(ranks):
            self._died = self._died or now
            return dead if now - self._died >= SETTLE_S or all(one.gone or one.ended for one in ranks) else None
        if self._deadline.passed(ranks, now):
            return diagnosis.hang(ranks, self._deadline.quiet_ranks(now))
        return None

    def _report(self, ranks: Sequence[Evidence], found: Diagnosis, silent_s: float) -> list[str]:
        try:
            where = f" Report: {hang_report.write(self._run, ranks, found, silent_s)}"
        except OSError as error:
            where = f" The report cannot be written ({error.strerror})."
        self._faults(found.kind)
        if found.kind in hang_report.ENDED:
            return [f"{found.sentence}{where}"]
        node = hang_report.node_at_fault([(one.rank, one.node) for one in ranks], found.ranks)
        if self._suspects and node:
            self._suspects.hung(ranks, node)
        self._kill(ranks, found.ranks)
        step = max(one.step for one in ranks)
        return [
            f"No progress for {silent_s:.0f} s after step {step}: {found.kind}. {found.sentence}",
            f"The rank is killed; Ray restarts the workers from the newest checkpoint.{where}",
        ]

    def _kill(self, ranks: Sequence[Evidence], at_fault: Sequence[int]) -> None:
        """Requests the death of the ranks at fault from their sentinels. If those are out of reach, or all ranks are suspect, one
        other rank's death makes Ray restart all."""
        quiet = self._deadline.quiet_ranks(self._clock())
        targets = [rank for rank in at_fault if rank not in quiet and len(at_fault) < len(ranks)]
        living = [one.rank for one in ranks if one.rank not in quiet and not one.gone]
        for rank in targets or living[:1]:
            (self._folder / f"kill-{self._session}-{rank}").touch()

    def _slow_ranks(self, ranks: Sequence[Evidence], now: float) -> list[str]:
        by_rank = {one.rank: one for one in ranks}
        found = self._stragglers.seen(ranks, now)
        for rank, factor in self._stragglers.factors(ranks).items():
            if rank in self._stragglers.named:
                self._slowness(by_rank[rank], factor)
        lines = [slow.sentence(by_rank[slow.rank]) for slow in found]
        assert self._section
        if self._section.replace_stragglers and self._suspects and (found or now >= self._spare_due):
            self._spare_due = now + SPARE_EVERY_S
            lines += self._replace(ranks, {slow.rank for slow in found})
        return lines

    def _replace(self, ranks: Sequence[Evidence], new: set[int]) -> list[str]:
        """Has the workers restarted without the node of a slow rank, if there is a spare: one node at a time."""
        assert self._suspects
        by_rank = {one.rank: one for one in ranks}
        for rank in sorted(self._stragglers.named):
            one = by_rank[rank]
            if one.node and self._suspects.slow(ranks, one.node, f"Rank {rank} was slow at step {one.step}."):
                self._reported = self._session
                self._kill(ranks, (rank,))
                return [f"Rank {rank} is killed; Ray restarts the workers without its node."]
        return ["No other node has free resources for a replacement; the run continues with the slow rank."] if new else []


def _exported(run: str) -> tuple[Callable[[str], None], Callable[[Evidence, float], None]]:
    """Counter of faults and gauge of slowness, exported by the driver through Ray."""
    from ray.util.metrics import Counter, Gauge

    faults, slow = metrics.TRAIN_FAULTS, metrics.TRAIN_RANK_SLOWNESS
    counter = Counter(faults.name, faults.help, faults.labels)
    gauge = Gauge(slow.name, slow.help, slow.labels)

    def fault(kind: str) -> None:
        counter.inc(1, {"run": run, "kind": kind})

    def slowness(one: Evidence, factor: float) -> None:
        gauge.set(factor, {"run": run, "rank": str(one.rank), "host": one.host})

    return fault, slowness
