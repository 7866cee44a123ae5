"""Tells which request killed an engine, and keeps suspects apart until that is known.

A request that was on an engine when the engine failed has a *strike* and is a suspect, and so are all that were beside it. A
suspect enters its next engine on probation: only after every other request there has its first token, and with nobody else
entering until it has its own. If the engine fails meanwhile, the suspect is what kills engines; later on, it is if nobody entered
after it and no other suspect is there. Where that is not clear it runs alone on the next engine. All waiting is bounded, so that
a suspect delays others by seconds at most.

An engine that was killed from outside (SIGKILL, SIGTERM, a lost node) gives no strike, unless the kernel killed it for memory.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_FAILED_ENGINES = 2  # engines that a request may take with it
PROBATION_S = 10.0  # at most, until a suspect has its first token
SETTLING_S = 10.0  # at most, until the others have theirs
ALONE_S = 30.0  # at most: alone on an engine, and before that until the others are done
KNOWN_S = 0.25  # until an engine knows of a request that entered
POLL_S = 0.02
FROM_OUTSIDE = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)


def cause_of_death(exit_codes: list[int | None], out_of_memory: bool) -> tuple[str, bool]:
    """In words, and whether the engine failed by itself. An engine that raised an exception tells so before its process ends."""
    ended = [code for code in exit_codes if code is not None]
    if not ended:
        return "it raised an exception", True
    code = next((code for code in ended if code not in FROM_OUTSIDE), ended[0])
    if code == -signal.SIGKILL and out_of_memory:
        return "killed for want of memory", True
    words = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return words, code not in FROM_OUTSIDE


def killed_for_memory() -> int:
    """Processes that the kernel of this machine has killed so far to free memory."""
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counters.get("oom_kill", 0))


@dataclass
class Stay:
    """One request on one engine, from its first sequence's start to its last one's end."""

    strikes: int
    entered: int  # greater than of all who entered before
    apart: bool  # on probation, and the others were settled
    sequences: int = 1


class Quarantine:
    def __init__(self, prefilling: Callable[[], bool]) -> None:
        """`prefilling`: whether any request on the engine is without its first token."""
        self._prefilling = prefilling
        self._inside: dict[Hashable, Stay] = {}
        self._entries = 0
        self._probation = asyncio.Lock()  # of one suspect at a time
        self._closed_for: Hashable | None = None  # nobody else enters
        self._opened = asyncio.Event()

    async def enter(self, request: Hashable, strikes: int) -> None:
        """Returns when the request may start on the engine. Each call needs a `leave`."""
        if strikes and request not in self._inside:
            await self._enter_on_probation(request, strikes)
            return
        while self._closed_for not in (None, request):
            await self._opened.wait()
        self._admit(request, strikes)

    def leave(self, request: Hashable) -> None:
        stay = self._inside.get(request)
        if stay is None:
            return
        stay.sequences -= 1
        if not stay.sequences:
            del self._inside[request]

    def verdict(self, request: Hashable) -> dict[str, Any] | None:
        """The strikes of a request after this engine failed under it, and whether it is to blame. None if it was not there."""
        stay = self._inside.get(request)
        if stay is None:
            return None
        others = [other for name, other in self._inside.items() if name != request]
        if others and self._closed_for == request:
            clear = stay.apart
        else:
            clear = not any(other.strikes or other.entered > stay.entered for other in others)
        strikes = stay.strikes + 1
        return {"strikes": strikes, "guilty": strikes >= MAX_FAILED_ENGINES and clear}

    def _admit(self, request: Hashable, strikes: int, apart: bool = False) -> None:
        if request in self._inside:
            self._inside[request].sequences += 1
            return
        self._entries += 1
        self._inside[request] = Stay(strikes, self._entries, apart)

    async def _enter_on_probation(self, request: Hashable, strikes: int) -> None:
        await self._probation.acquire()
        if request in self._inside:  # another of its sequences, which waited behind the first
            self._probation.release()
            self._admit(request, strikes)
            return
        self._closed_for = request
        self._opened.clear()
        alone = strikes >= MAX_FAILED_ENGINES
        try:
            apart = await _until(lambda: not (self._inside if alone else self._prefilling()), ALONE_S if alone else SETTLING_S)
        except BaseException:
            self._open()
            raise
        self._admit(request, strikes, apart)
        self._watching = asyncio.get_running_loop().create_task(self._watch(request, alone))  # held, or it may be collected

    async def _watch(self, request: Hashable, alone: bool) -> None:
        """Ends the probation of a request that has left or has its first token; or, alone, of one that has run for long."""
        known = time.monotonic() + KNOWN_S

        def over() -> bool:
            return request not in self._inside or (not alone and time.monotonic() > known and not self._prefilling())

        try:
            await _until(over, ALONE_S if alone else PROBATION_S)
        finally:
            self._open()

    def _open(self) -> None:
        self._closed_for = None
        self._opened.set()
        self._probation.release()


async def _until(done: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True
