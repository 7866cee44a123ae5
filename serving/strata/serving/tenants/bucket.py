"""Token bucket of a limit per minute. It holds a minute's worth, which may be used at once."""

import math
from collections.abc import Callable

MINUTE_S = 60.0


class Bucket:
    """Stores what was used and has not flowed back, not what is left: the limit may change at any time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used, self._at = 0.0, clock()
        self._limit = 0  # the last one

    def _flow(self, limit: int) -> float:
        now, self._limit = self._clock(), limit
        self._used = max(0.0, self._used - max(0.0, now - self._at) * limit / MINUTE_S)
        self._at = now
        return self._used

    def add(self, amount: int, limit: int) -> None:
        """Uses `amount`; a negative one is given back. Corrections may use more than there is, and later requests wait."""
        self._used = max(0.0, self._flow(limit) + amount)

    def add_elsewhere(self, amount: int) -> None:
        """Adds what other gateways used, which do not send the limit."""
        self._used = max(0.0, self._flow(self._limit) + amount)

    def wait_s(self, amount: int, limit: int) -> float:
        """Seconds until `amount` can be used; infinite if it exceeds the limit."""
        if amount > limit:
            return math.inf
        return max(0.0, self._flow(limit) + amount - limit) * MINUTE_S / limit

    def left(self, limit: int) -> int:
        return max(0, math.floor(limit - self._flow(limit)))

    def reset_s(self, limit: int) -> float:
        """Seconds until nothing is used."""
        return self._flow(limit) * MINUTE_S / limit


def duration(seconds: float) -> str:
    """Duration as in OpenAI's headers: 250ms, 1.5s, 6m0s, 23h59m59s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms" if seconds > 0 else "0s"
    if seconds < 60:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
