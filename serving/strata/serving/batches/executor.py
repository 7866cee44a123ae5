"""Finds batches that no gateway runs, and runs a few of them at a time."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from strata.serving.batches import lock, store
from strata.serving.batches.in_process import Answered
from strata.serving.batches.lock import Lock
from strata.serving.batches.meter import Meter
from strata.serving.batches.records import ENDED
from strata.serving.batches.runner import Runner
from strata.serving.batches.slots import Slots
from strata.serving.batches.store import Space

logger = logging.getLogger("ray.serve")

LOOK_S = 1.0
AT_ONCE = 8  # batches of one gateway
CRASHES = 3  # of the code that runs a batch, until the batch fails
UNBORN_S = 60.0  # age of a pending mark whose batch was never stored

Ask = Callable[[str, str, bytes, str], Awaitable[Answered]]  # space, path, body, request id


class Executor:
    def __init__(self, root: Path, ask: Ask, slots: Slots, meter: Meter, wall: Callable[[], float] = time.time) -> None:
        self._root, self._ask, self.slots, self._meter, self._wall = root, ask, slots, meter, wall
        self._active: dict[str, tuple[str, asyncio.Task[None]]] = {}  # spaces and tasks by batch
        self._crashes: Counter[str] = Counter()
        self._logged = ""
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = asyncio.get_running_loop().create_task(self._look_forever())

    async def stop(self) -> None:
        """Leaves the batches to other gateways, or to the next start."""
        tasks = [task for _, task in self._active.values()] + ([self._looking] if self._looking is not None else [])
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _look_forever(self) -> None:
        await asyncio.to_thread(store.remove_abandoned, self._root)
        while True:
            try:
                await self.look()
                self._logged = ""
            except Exception as error:  # storage that does not answer; one line per outage
                if str(error) != self._logged:
                    logger.warning("The batches could not be read; retrying.", exc_info=True)
                self._logged = str(error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Starts at most one batch, so that several gateways share many. Tenants with fewer running batches come first."""
        if len(self._active) >= AT_ONCE:
            return
        found = await asyncio.to_thread(store.pending, self._root)
        running = Counter(space for space, _ in self._active.values())
        for name, batch in sorted(found, key=lambda each: running[each[0]]):
            if batch not in self._active and (held := await asyncio.to_thread(self._claim, Space(self._root, name), batch)):
                task = asyncio.get_running_loop().create_task(self._run(Space(self._root, name), batch, held))
                self._active[batch] = name, task
                return

    def _claim(self, space: Space, name: str) -> Lock | None:
        """Lock of a batch that has not ended. Only its holder may change the record."""
        held = lock.acquire(space.lock_file(name))
        if held is None:
            return None
        batch, mark = space.batch(name), space.pending_mark(name)
        if batch is not None and batch.status not in ENDED and mark.exists():
            return held
        try:
            if batch is not None or mark.stat().st_mtime < time.time() - UNBORN_S:
                mark.unlink(missing_ok=True)  # a kill came between the last record and this
        except FileNotFoundError:
            pass
        held.release()
        return None

    async def _run(self, space: Space, name: str, held: Lock) -> None:
        try:
            batch = await asyncio.to_thread(space.batch, name)
            assert batch is not None
            await Runner(space, batch, partial(self._ask, space.name), self.slots, self._meter, self._wall).run()
            space.lock_file(name).unlink(missing_ok=True)
        except Exception:
            self._crashes[name] += 1
            logger.exception("Running the batch %s failed.", name)
            if self._crashes[name] >= CRASHES:
                await asyncio.to_thread(self._give_up, space, name)
            else:
                await asyncio.sleep(LOOK_S * 2 ** self._crashes[name])
        finally:
            held.release()
            del self._active[name]

    def _give_up(self, space: Space, name: str) -> None:
        batch = space.batch(name)
        assert batch is not None
        error = {"code": "server_error", "message": "The server failed on this batch.", "param": None, "line": None}
        times = batch.times | {"failed_at": int(self._wall())}
        space.end_batch(replace(batch, status="failed", times=times, errors=(error,)))
