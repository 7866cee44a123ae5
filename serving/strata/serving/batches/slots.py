"""Idle slots of the engines, which lines of batches may use.

A batch uses at most half of the sequences that the engines run at once, and only those that nobody else uses, so that other
requests always find free ones.
"""

import asyncio
import contextlib
from collections.abc import Callable

SHARE = 0.5
LOOK_S = 0.2  # others' use of the engines changes without a notice


def idle(slots: int, busy: int, batches: int) -> int:
    """Sequences that batches may start. Of `slots`, `busy` are used, and of those `batches` by lines of batches."""
    return min(max(1, int(slots * SHARE)) - batches, slots - busy)


class Slots:
    def __init__(self, free: Callable[[], int]) -> None:
        """`free` returns the sequences that may start now."""
        self._free = free
        self._turn = asyncio.Lock()  # first come, first served
        self._released = asyncio.Event()
        self.running = 0  # sequences of batches, through this gateway

    async def acquire(self, sequences: int) -> None:
        """Returns when a request may start. One with more sequences than are ever free starts when none of a batch runs."""
        async with self._turn:
            while (free := self._free()) < 1 or (free < sequences and self.running):
                self._released.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._released.wait(), LOOK_S)
            self.running += sequences

    def release(self, sequences: int) -> None:
        self.running -= sequences
        self._released.set()
