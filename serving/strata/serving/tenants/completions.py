"""Completion rate of sequences in a busy period, and the Retry-After that follows from it."""

import math
from collections import deque
from collections.abc import Callable

LONGEST_RETRY_S = 60
WINDOW_S = 30.0  # the completion rate is measured over this window


class Completions:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: deque[tuple[float, int]] = deque()  # (time, sequences) of completions within the window
        self._left = 0  # sum of the sequences in `_ended`
        self._busy_since = 0.0  # start of the current period with at least one sequence in flight

    def busy(self) -> None:
        """Begins a busy period: sequences are in flight after none were."""
        self._busy_since = self._clock()
        self._ended.clear()
        self._left = 0

    def ended(self, sequences: int) -> None:
        self._ended.append((self._clock(), sequences))
        self._left += sequences
        self._forget()

    def _forget(self) -> None:
        while self._ended and self._ended[0][0] < self._clock() - WINDOW_S:
            self._left -= self._ended.popleft()[1]

    def retry_after(self, excess: int, in_flight: int) -> int:
        """Seconds until `excess` sequences have completed, at the recent completion rate. At least the time for a quarter of the
        sequences in flight: other rejected clients retry too."""
        self._forget()
        busy_s = min(self._clock() - self._busy_since, WINDOW_S) if in_flight else 0.0
        # Nothing completed since the busy period began: the best estimate is the same time again.
        wait = max(excess, in_flight / 4) * busy_s / self._left if self._left else busy_s
        return min(max(1, math.ceil(wait)), LONGEST_RETRY_S)
