"""Admission control: limits the sequences in flight and rejects the excess with a 429.

An immediate 429 with Retry-After serves a client better than a queue in which its request would time out.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strata.serving.api.requests import ApiError

LONGEST_RETRY_S = 60
WINDOW_S = 30.0  # the completion rate is measured over this window


def capacity(replicas: int, configured: int, max_sequences: int, max_queue: int) -> int:
    """Sequences that an endpoint may have in flight, running or queued. Of `configured` decode replicas, those that are being
    replaced count too: requests that wait for them will be served."""
    return max(replicas, configured) * max_sequences + max_queue


class Admission:
    def __init__(self, capacity: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """`capacity` returns the sequences that this gateway may have in flight: the endpoint's, less those that other gateways
        admitted. It is called for every request, since replicas come and go."""
        self._capacity, self._clock = capacity, clock
        self._ended: deque[tuple[float, int]] = deque()  # (time, sequences) of completions within the window
        self._left = 0  # sum of the sequences in `_ended`
        self._busy_since = 0.0  # start of the current period with at least one sequence in flight
        self.admitted_sequences = 0

    @contextmanager
    def admitted(self, sequences: int) -> Iterator[None]:
        capacity = self._capacity()
        if self.admitted_sequences + sequences > capacity:
            wait = str(self._retry_after(self.admitted_sequences + sequences - capacity))
            raise ApiError(429, f"Too many concurrent requests. Try again in {wait} s.", headers={"retry-after": wait})
        if not self.admitted_sequences:
            self._busy_since = self._clock()
            self._ended.clear()
            self._left = 0
        self.admitted_sequences += sequences
        try:
            yield
        finally:
            self.admitted_sequences -= sequences
            self._ended.append((self._clock(), sequences))
            self._left += sequences
            self._forget()

    def _forget(self) -> None:
        while self._ended and self._ended[0][0] < self._clock() - WINDOW_S:
            self._left -= self._ended.popleft()[1]

    def _retry_after(self, excess: int) -> int:
        """Seconds until `excess` sequences have completed, at the recent completion rate. At least the time for a quarter of the
        sequences in flight: other rejected clients retry too."""
        self._forget()
        busy_s = min(self._clock() - self._busy_since, WINDOW_S) if self.admitted_sequences else 0.0
        # Nothing completed since the busy period began: the best estimate is the same time again.
        wait = max(excess, self.admitted_sequences / 4) * busy_s / self._left if self._left else busy_s
        return min(max(1, math.ceil(wait)), LONGEST_RETRY_S)
