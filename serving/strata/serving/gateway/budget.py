"""Limit on the bytes of requests and answers that one gateway holds in memory at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from strata.serving.api.requests import ApiError

BUDGET_BYTES = 128 * 2**20
# Not counted for each request: small requests still pass while large ones use up the budget. The number of connections
# bounds the sum.
FREE_BYTES = 32 * 2**10


class Hold:
    """Bytes that one request holds."""

    def __init__(self, budget: "Budget") -> None:
        self._budget = budget
        self._bytes = 0

    @property
    def counted(self) -> int:
        return max(0, self._bytes - FREE_BYTES)

    def require(self, count: int) -> None:
        """Raises a 429 if `count` more bytes exceed the budget."""
        if max(0, self._bytes + count - FREE_BYTES) - self.counted > self._budget.left:
            message = "The gateway's memory for requests and answers is full. Try again later."
            raise ApiError(429, message, headers={"retry-after": "1"})

    def grow(self, count: int) -> None:
        self.require(count)
        before = self.counted
        self._bytes += count
        self._budget.left -= self.counted - before


class Budget:
    def __init__(self, limit: int = BUDGET_BYTES) -> None:
        self.left = limit

    @contextmanager
    def hold(self) -> Iterator[Hold]:
        hold = Hold(self)
        try:
            yield hold
        finally:
            self.left += hold.counted
