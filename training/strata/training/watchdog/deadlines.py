"""Time without progress, and the time after which that is a hang.

A mark of any rank is progress: a phase entered, a collective begun or finished. Between two marks a run may compute for long, so
the limit scales with the run's own intervals. At the start, in an evaluation and in a checkpoint, a rank that uses its CPU or
its disk makes progress too: compilation and uploads leave no marks.
"""

from collections import deque
from collections.abc import Sequence

from strata.training.watchdog.evidence import Evidence

TIMES_LONGEST = 3.0
RECENT = 200  # intervals by which the limit scales
SLOW = ("start", "evaluation", "checkpoint")
START_LIMIT_S = 120.0  # without a sign of work, before the first step is finished
SLOW_LIMIT_S = 900.0  # with signs of work and without a mark
ACTIVE_CPU = 0.05  # cores; a monitor thread uses a fifth of this
ACTIVE_IO = 2**20  # bytes per second


class Deadline:
    """Follows the marks of one start of the workers."""

    def __init__(self, hang_s: float, now: float) -> None:
        self._hang_s = hang_s
        self._marks: dict[int, tuple[int, str | None]] = {}
        self._marked = self._active = now
        self._intervals: deque[float] = deque(maxlen=RECENT)
        self._reports: dict[int, tuple[float, float]] = {}  # each rank's last report: its time there, and when it was read here

    def seen(self, ranks: Sequence[Evidence], now: float) -> None:
        for one in ranks:
            if self._reports.get(one.rank, (None, 0.0))[0] != one.seen_at:
                self._reports[one.rank] = one.seen_at, now
        marks = {one.rank: (one.marks, one.ended) for one in ranks}
        if marks != self._marks:
            if self._settled(ranks):
                self._intervals.append(now - self._marked)
            self._marks, self._marked, self._active = marks, now, now
        elif any(_active(one) for one in ranks) and (not self._settled(ranks) or any(one.phase in SLOW for one in ranks)):
            self._active = now

    def silent_s(self, now: float) -> float:
        return now - self._marked

    def quiet_ranks(self, now: float) -> list[int]:
        """Ranks whose sentinel has stopped to report."""
        ended = {rank for rank, (_, ended) in self._marks.items() if ended}
        return [rank for rank, (_, read) in self._reports.items() if now - read > self._hang_s and rank not in ended]

    def passed(self, ranks: Sequence[Evidence], now: float) -> bool:
        if not ranks or all(one.ended for one in ranks):
            return False
        if any(one.state in "Tt" for one in ranks):
            return self.silent_s(now) > self._hang_s
        limit = max(self._hang_s, TIMES_LONGEST * max(self._intervals, default=0.0))
        if not self._settled(ranks):
            limit = max(limit, START_LIMIT_S)
        return now - self._active > limit or self.silent_s(now) > max(SLOW_LIMIT_S, limit)

    def _settled(self, ranks: Sequence[Evidence]) -> bool:
        """True once all ranks have finished a step since the workers started."""
        return bool(ranks) and len(ranks) == ranks[0].world and all(one.own_s for one in ranks)


def _active(one: Evidence) -> bool:
    return not one.waits and one.ended is None and (one.cpu > ACTIVE_CPU or one.io > ACTIVE_IO)
