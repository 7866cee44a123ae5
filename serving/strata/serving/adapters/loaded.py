"""Adapters in an engine's memory: loaded for their first request, evicted when idle and least recently used.

The engine would evict by itself, also an adapter with running streams, and read it again from its folder in the next step. An
engine dies if that fails, so the count stays within its memory here, and only adapters without requests are evicted.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from strata.platform.errors import UserError
from strata.serving.adapters import folder
from strata.serving.adapters.entry import Entry
from strata.serving.adapters.turns import Turns

logger = logging.getLogger("ray.serve")

# An adapter is loaded before it is listed in the directory; one that is never listed is dropped after this long.
UNLISTED_S = 120.0
EXPECTED_LOAD_S = 0.25  # before the first load
SAMPLE_WEIGHT = 0.3


class Recorder(Protocol):
    """Metrics of one replica."""

    def adapters(self, loaded: int, waiting: int) -> None: ...
    def adapter_loaded(self, seconds: float) -> None: ...
    def adapter_evicted(self, reason: str) -> None: ...


@dataclass
class _Slot:
    number: int  # the engine's id of the adapter
    since: float
    listed: bool = False  # it was seen in the directory


class Loaded:
    def __init__(
        self,
        add: Callable[[Entry, int], Awaitable[None]],
        remove: Callable[[int], Awaitable[None]],
        slots: int,
        in_memory: int,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`add` and `remove` load an adapter into the engine under a number, and free it. `slots`: adapters that the engine
        computes in one step. `in_memory`: adapters that it holds, at least as many."""
        assert in_memory >= slots
        self._add, self._remove, self._in_memory = add, remove, in_memory
        self._recorder, self._clock = recorder, clock
        self._numbers = count(1)
        self._turns = Turns(slots, clock)
        self._loading = asyncio.Lock()
        self._slots: OrderedDict[str, _Slot] = OrderedDict()  # by engine name, least recently used first
        self._loads: dict[str, asyncio.Task[bool]] = {}  # in progress
        self._failed: set[str] = set()  # listed, and not loaded ahead again
        self._load_s = EXPECTED_LOAD_S

    def report(self) -> dict[str, Any]:
        """For gateways: the adapters here, and the expected seconds to load another."""
        return {"adapters": list(self._slots), "adapter_load_s": round(self._load_s, 4)}

    def record(self) -> None:
        self._recorder.adapters(len(self._slots), self._turns.waiting)

    @asynccontextmanager
    async def used(self, entry: Entry) -> AsyncIterator[int]:
        """Holds the adapter in the engine while a request runs. Yields its number. Raises UserError if its folder changed."""
        name = entry.engine_name
        await self._turns.wait(name)
        try:
            while name not in self._slots:
                await self.load(entry)
            self._slots.move_to_end(name)
            yield self._slots[name].number
        finally:
            self._turns.leave(name)

    async def load(self, entry: Entry) -> bool:
        """Loads an adapter. False if every adapter in memory is in use, which cannot be if this one has a request. A load goes
        on when who waits for it is cancelled: the engine's count and ours must agree."""
        name = entry.engine_name
        if name in self._slots:
            return True
        if name not in self._loads:
            task = self._loads[name] = asyncio.get_running_loop().create_task(self._load(entry))
            task.add_done_callback(lambda _: self._loads.pop(name))
        return await asyncio.shield(self._loads[name])

    async def follow(self, listed: Iterable[Entry]) -> None:
        """Adapts to the directory: frees adapters that were removed, and loads others while there is free memory."""
        by_name = {entry.engine_name: entry for entry in listed}
        now = self._clock()
        for name, slot in list(self._slots.items()):
            if name not in by_name and (slot.listed or now - slot.since > UNLISTED_S):
                async with self._loading:
                    await self._evict(name, "removed")
        self._failed &= by_name.keys()
        for name, entry in by_name.items():
            if name not in self._slots and name not in self._failed and len(self._slots) < self._in_memory:
                try:
                    await self.load(entry)
                except Exception as error:
                    self._failed.add(name)
                    logger.error("Adapter %s was not loaded ahead: %s", name, error)
            if name in self._slots:
                self._slots[name].listed = True

    async def _load(self, entry: Entry) -> bool:
        async with self._loading:
            began = self._clock()
            # Also brings the file into the page cache, so that the engine, whose streams wait, reads it from memory.
            found = await asyncio.to_thread(folder.revision, Path(entry.folder))
            if found != entry.revision:
                cause = f"{entry.folder} has changed since the adapter '{entry.name}' was loaded from it."
                raise UserError(cause, "Load it again, with load_inplace.")
            while len(self._slots) >= self._in_memory:
                if (idle := self._longest_idle()) is None:
                    return False
                await self._evict(idle, "memory")
            number = next(self._numbers)
            await self._add(entry, number)
            self._slots[entry.engine_name] = _Slot(number, self._clock())
            seconds = self._clock() - began
        self._load_s += SAMPLE_WEIGHT * (seconds - self._load_s)
        self._recorder.adapter_loaded(seconds)
        logger.info("Adapter %s was loaded in %.3f s.", entry.engine_name, seconds)
        return True

    def _longest_idle(self) -> str | None:
        """The adapter without requests that was used least recently."""
        return next((name for name in self._slots if not self._turns.users(name)), None)

    async def _evict(self, name: str, reason: str) -> None:
        if name not in self._slots or self._turns.users(name):
            return
        slot = self._slots.pop(name)  # before the engine frees it, so that no request counts on it
        await self._remove(slot.number)
        self._recorder.adapter_evicted(reason)
