"""Decides during an attempt that the workers save a checkpoint and continue in another layout."""

import time
from collections.abc import Callable

from strata.platform.layout_rules import FixedLayout
from strata.training.elastic.capacity import Survey
from strata.training.layout import described
from strata.training.loop import Job

GROW_AFTER_S = 10.0  # for which a better layout has to be possible: nodes of a new group arrive one after the other


class Resizing:
    """Requests a resize when a node of the workers has a drain notice, or when the cluster has had capacity for a better layout
    for `grow_after_s`."""

    def __init__(
        self,
        job: Job,
        current: FixedLayout,
        choose: Callable[[int], FixedLayout | None],
        surveyed: Callable[[], Survey | None],
        grow_after_s: float = GROW_AFTER_S,
    ) -> None:
        self._job, self._current, self._choose, self._surveyed = job, current, choose, surveyed
        self._grow_after_s = grow_after_s
        self._better: tuple[FixedLayout, float] | None = None  # and the time since when it has been possible
        self.requested: str | None = None

    def news(self) -> list[str]:
        """Looks at the newest survey. Returns a line when a resize is requested."""
        survey = self._surveyed()
        if self.requested or survey is None:
            return []
        if survey.draining and (leaving := survey.draining & nodes(self._job)):
            count = f"{len(leaving)} of the workers' nodes" if len(leaving) > 1 else "A node of the workers"
            return self._request(f"{count} will be taken away. The run saves a checkpoint and continues without it.")
        better = self._choose(self._current.parallel.workers + survey.free)
        if better is None or better.parallel == self._current.parallel:
            self._better = None
            return []
        now = time.monotonic()
        if self._better is None or self._better[0] != better:
            self._better = better, now
        if now - self._better[1] < self._grow_after_s or not nodes(self._job):
            return []
        return self._request(f"There is capacity for {described(better.parallel)}: a checkpoint is saved for it.")

    def possible(self, workers: int) -> bool:
        """True if the run has a layout for this capacity."""
        return self._choose(workers) is not None

    def _request(self, line: str) -> list[str]:
        try:
            self._job.resize.touch()
        except OSError as error:
            line = f"A resize cannot be requested: {error}."
        self.requested = line
        return [line]


def nodes(job: Job) -> frozenset[str]:
    """Ids of the nodes on which the attempt's workers run; none before they have started."""
    try:
        return frozenset(job.nodes.read_text().split())
    except FileNotFoundError:
        return frozenset()
