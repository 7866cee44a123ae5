"""How many requests may be under way. One more than that is told at once to come back later, which serves it better than a
queue it would time out in."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strata.serving.api.requests import ApiError

LONGEST_RETRY_S = 60
WINDOW_S = 30.0  # over which the rate is taken


class Admission:
    def __init__(self, room: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """`room` is for how many, less those whom other gateways have let in. Asked anew each time: replicas come and go."""
        self._room, self._clock = room, clock
        self._ended: deque[tuple[float, int]] = deque()  # when, and how many sequences, within the window
        self._left = 0  # sequences in it
        self._busy_since = 0.0  # without a moment in which nobody was inside
        self.inside = 0

    @contextmanager
    def admitted(self, sequences: int) -> Iterator[None]:
        room = self._room()
        if self.inside + sequences > room:
            wait = str(self._retry_after(self.inside + sequences - room))
            raise ApiError(429, f"Too many requests at once. Try again in {wait} s.", headers={"retry-after": wait})
        if not self.inside:
            self._busy_since = self._clock()
            self._ended.clear()
            self._left = 0
        self.inside += sequences
        try:
            yield
        finally:
            self.inside -= sequences
            self._ended.append((self._clock(), sequences))
            self._left += sequences
            self._forget()

    def _forget(self) -> None:
        while self._ended and self._ended[0][0] < self._clock() - WINDOW_S:
            self._left -= self._ended.popleft()[1]

    def _retry_after(self, excess: int) -> int:
        """Until enough sequences have left, at the rate at which they left lately. A quarter of those inside at least: others
        were told to come back as well."""
        self._forget()
        busy_s = min(self._clock() - self._busy_since, WINDOW_S) if self.inside else 0.0
        # If nobody has left for so long, it takes as long again for all we know.
        wait = max(excess, self.inside / 4) * busy_s / self._left if self._left else busy_s
        return min(max(1, math.ceil(wait)), LONGEST_RETRY_S)
