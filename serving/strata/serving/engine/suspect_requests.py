"""Finds the request that crashes engines, and isolates suspects until it is found.

Every request that was on an engine when the engine failed gets a *strike* and becomes a suspect. A suspect enters its next
engine on probation: only after every other request there has its first token, and no other request enters until the suspect
has its own. If the engine fails during probation, the suspect is the cause. If it fails later, the suspect is the cause unless
another request entered after it or another suspect is there. If the cause is not clear, the suspect runs alone on the next
engine. All waits are bounded, so a suspect delays other requests by seconds at most.

An engine that was killed from outside (SIGKILL, SIGTERM, a lost node) causes no strikes, unless the kernel's OOM killer did it.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_FAILED_ENGINES = 2  # strikes from which a request can be the cause
PROBATION_S = 10.0  # limit for a suspect to get its first token
SETTLING_S = 10.0  # limit for the others to get theirs
ALONE_S = 30.0  # limit for running alone on an engine, and for the others to finish before that
KNOWN_S = 0.25  # until an engine reports a request that entered
POLL_S = 0.02
FROM_OUTSIDE = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)


def cause_of_death(exit_codes: list[int | None], out_of_memory: bool) -> tuple[str, bool]:
    """Description, and whether the engine failed by itself. After an exception the engine reports before its process ends."""
    ended = [code for code in exit_codes if code is not None]
    if not ended:
        return "it raised an exception", True
    code = next((code for code in ended if code not in FROM_OUTSIDE), ended[0])
    if code == -signal.SIGKILL and out_of_memory:
        return "out of memory", True
    words = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return words, code not in FROM_OUTSIDE


def killed_for_memory() -> int:
    """Number of OOM kills on this machine since boot."""
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counters.get("oom_kill", 0))


@dataclass
class Residency:
    """Request on an engine, from the start of its first sequence to the end of its last."""

    strikes: int
    entered: int  # order of entry
    isolated: bool  # entered on probation, after the others had their first tokens
    sequences: int = 1


class Quarantine:
    """Requests on one engine. Suspects enter it on probation."""

    def __init__(self, prefilling: Callable[[], bool]) -> None:
        """`prefilling` returns whether any request on the engine has no first token yet."""
        self._prefilling = prefilling
        self._requests: dict[Hashable, Residency] = {}
        self._entries = 0
        self._probation = asyncio.Lock()  # held for one suspect at a time
        self._exclusive: Hashable | None = None  # no other request enters
        self._available = asyncio.Event()

    async def enter(self, request: Hashable, strikes: int) -> None:
        """Returns when the request may start on the engine. Each call needs a `leave`."""
        if strikes and request not in self._requests:
            await self._enter_on_probation(request, strikes)
            return
        while self._exclusive not in (None, request):
            await self._available.wait()
        self._admit(request, strikes)

    def leave(self, request: Hashable) -> None:
        residency = self._requests.get(request)
        if residency is None:
            return
        residency.sequences -= 1
        if not residency.sequences:
            del self._requests[request]

    def verdict(self, request: Hashable) -> dict[str, Any] | None:
        """Strikes of a request after this engine failed, and whether it is the cause. None if it was not on the engine."""
        residency = self._requests.get(request)
        if residency is None:
            return None
        others = [other for name, other in self._requests.items() if name != request]
        if others and self._exclusive == request:
            clear = residency.isolated
        else:
            clear = not any(other.strikes or other.entered > residency.entered for other in others)
        strikes = residency.strikes + 1
        return {"strikes": strikes, "guilty": strikes >= MAX_FAILED_ENGINES and clear}

    def _admit(self, request: Hashable, strikes: int, isolated: bool = False) -> None:
        if request in self._requests:
            self._requests[request].sequences += 1
            return
        self._entries += 1
        self._requests[request] = Residency(strikes, self._entries, isolated)

    async def _enter_on_probation(self, request: Hashable, strikes: int) -> None:
        await self._probation.acquire()
        if request in self._requests:  # another sequence of the same request
            self._probation.release()
            self._admit(request, strikes)
            return
        self._exclusive = request
        self._available.clear()
        alone = strikes >= MAX_FAILED_ENGINES
        try:
            isolated = await _until(
                lambda: not (self._requests if alone else self._prefilling()), ALONE_S if alone else SETTLING_S
            )
        except BaseException:
            self._end_probation()
            raise
        self._admit(request, strikes, isolated)
        # Referenced, or the task may be garbage collected.
        self._watching = asyncio.get_running_loop().create_task(self._watch(request, alone))

    async def _watch(self, request: Hashable, alone: bool) -> None:
        """Ends the probation when the request has its first token or has left; if it runs alone, after ALONE_S at the latest."""
        known = time.monotonic() + KNOWN_S

        def over() -> bool:
            return request not in self._requests or (not alone and time.monotonic() > known and not self._prefilling())

        try:
            await _until(over, ALONE_S if alone else PROBATION_S)
        finally:
            self._end_probation()

    def _end_probation(self) -> None:
        self._exclusive = None
        self._available.set()
        self._probation.release()


async def _until(done: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True
