"""How many requests may be under way. One more than that is told at once to come back later, which serves it better than a
queue it would time out in."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strata.serving.requests import ApiError

LONGEST_RETRY_S = 60


class Admission:
    def __init__(self, room: Callable[[], int]) -> None:
        """`room` is for how many, less those whom other gateways have let in. Asked anew each time: replicas come and go."""
        self._room = room
        self._ended: deque[float] = deque(maxlen=64)
        self.inside = 0

    @contextmanager
    def admitted(self, sequences: int) -> Iterator[None]:
        if self.inside + sequences > self._room():
            wait = str(self._retry_after())
            raise ApiError(
                429, f"Too many requests at once. Try again in {wait} s.", "rate_limit_error", headers={"retry-after": wait}
            )
        self.inside += sequences
        try:
            yield
        finally:
            self.inside -= sequences
            self._ended.append(time.monotonic())

    def _retry_after(self) -> int:
        """Until a quarter of those inside have left, at the rate at which they leave."""
        if len(self._ended) < 2:
            return 1
        rate = len(self._ended) / max(time.monotonic() - self._ended[0], 1e-3)
        return min(max(1, math.ceil(self.inside / 4 / rate)), LONGEST_RETRY_S)
