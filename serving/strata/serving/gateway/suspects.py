"""Remembers which requests were on engines that failed, and refuses those that kill engines, for a while.

Requests are known by their content: one that is sent again, by whomever, is the same. The verdict
is a replica's (`engine/suspect_requests.py`).
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from strata.serving.api.requests import NOTES, ApiError, parse

REFUSED_S = 600
REMEMBERED = 1024
# Parameters that do not change what an engine computes.
ASIDE = NOTES | {"model", "stream", "stream_options", "seed", "session_id", "cache_salt", "service_tier", "store"}


class Content:
    """What a request asks of an engine, as a digest. Computed when it is first needed: hardly any request is a suspect."""

    def __init__(self, method: str, body: bytes) -> None:
        self._method, self._body = method, body

    @cached_property
    def digest(self) -> str:
        asked = {key: value for key, value in parse(self._body).items() if key not in ASIDE and value is not None}
        return hashlib.sha256(msgspec.json.encode([self._method, asked], order="sorted")).hexdigest()


class Suspects:
    def __init__(self, tell: Callable[[str, dict[str, Any]], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`tell` is given what other gateways should hear: a digest, and the verdict on it."""
        self._tell, self._clock = tell, clock
        self._strikes: OrderedDict[str, tuple[int, float]] = OrderedDict()  # and until when they count
        self._refused: OrderedDict[str, float] = OrderedDict()
        self._apart: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def strikes(self, content: Content) -> int:
        """Engines that failed under such a request. Raises a 400 if they failed because of it."""
        if not (self._refused or self._strikes):
            return 0
        until = self._refused.get(content.digest)
        if until is not None and self._clock() < until:
            raise _refusal()
        strikes, counted_until = self._strikes.get(content.digest, (0, 0.0))
        return strikes if self._clock() < counted_until else 0

    @asynccontextmanager
    async def apart(self, content: Content) -> AsyncIterator[None]:
        """Of suspects alike one at a time is tried: its verdict is the others' too."""
        lock = self._apart.setdefault(content.digest, asyncio.Lock())
        async with lock:
            yield

    def judge(self, content: Content, verdict: dict[str, Any]) -> bool:
        """Whether the request is to blame, and no longer tried."""
        self.hear(content.digest, verdict)
        self._tell(content.digest, verdict)
        return bool(verdict["guilty"])

    def hear(self, digest: str, verdict: dict[str, Any]) -> None:
        until = self._clock() + REFUSED_S
        if verdict["guilty"]:
            self._strikes.pop(digest, None)
            _put(self._refused, digest, until)
        else:
            _put(self._strikes, digest, (verdict["strikes"], until))

    def clear(self, content: Content) -> None:
        """It was answered: whatever failed, it was something else."""
        self._strikes.pop(content.digest, None)


def _refusal() -> ApiError:
    minutes = REFUSED_S // 60
    message = f"Engines failed each time that this request was on them. It is not tried again, and refused for {minutes} minutes."
    return ApiError(400, message)


def _put(table: OrderedDict[str, Any], digest: str, value: Any) -> None:
    table[digest] = value
    table.move_to_end(digest)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
