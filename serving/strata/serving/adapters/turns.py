"""Turns of adapters in an engine's slots.

An engine computes a limited number of different adapters in one step. A request whose adapter has no slot waits for one. Requests
for adapters that have one pass it at first, so that no slot is idle; after `PASSED_S` nobody passes it any more, the other
adapters' requests end, and it gets the next free slot. So more adapters than slots share an engine without starvation.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

PASSED_S = 1.0


@dataclass(frozen=True, eq=False)
class _Waiting:
    name: str
    since: float
    turn: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots, self._clock = slots, clock
        self._users: Counter[str] = Counter()
        self._queue: list[_Waiting] = []  # first come first

    def users(self, name: str) -> int:
        """Requests of an adapter that have a slot."""
        return self._users[name]

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def wait(self, name: str) -> None:
        """Returns with a slot for the adapter, which `leave` frees."""
        waiting = _Waiting(name, self._clock())
        self._queue.append(waiting)
        self._grant()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
                self._grant()  # it may have been the one that nobody passes
            else:
                self.leave(name)
            raise

    def leave(self, name: str) -> None:
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
        self._grant()

    def _grant(self) -> None:
        now = self._clock()
        for waiting in list(self._queue):
            if waiting.turn.cancelled():  # and `wait`, which takes it from the queue, has not run yet
                continue
            if waiting.name in self._users or len(self._users) < self._slots:
                self._users[waiting.name] += 1
                self._queue.remove(waiting)
                waiting.turn.set_result(None)
            elif now - waiting.since > PASSED_S:
                return
