"""Refuses requests that crash engines, for REFUSED_S.

Requests are identified by content, so a request that is sent again, by any client, is recognized. Replicas decide the verdict
(`engine/suspect_requests.py`); gateways share it.
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
IGNORED = NOTES | {"model", "stream", "stream_options", "seed", "session_id", "cache_salt", "service_tier", "store"}


class Content:
    """Digest of the parameters that affect an engine. Computed on first use: hardly any request is a suspect."""

    def __init__(self, method: str, body: bytes, pool: str = "") -> None:
        """`pool`: engines of one model are not judged by those of another."""
        self._method, self._body, self._pool = method, body, pool

    @cached_property
    def digest(self) -> str:
        relevant = {key: value for key, value in parse(self._body).items() if key not in IGNORED and value is not None}
        return hashlib.sha256(msgspec.json.encode([self._pool, self._method, relevant], order="sorted")).hexdigest()


class Suspects:
    def __init__(self, broadcast: Callable[[str, dict[str, Any]], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`broadcast` sends a digest and its verdict to the other gateways."""
        self._broadcast, self._clock = broadcast, clock
        self._strikes: OrderedDict[str, tuple[int, float]] = OrderedDict()  # strikes, and the time until they count
        self._refused: OrderedDict[str, float] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def strikes(self, content: Content) -> int:
        """Number of engines that failed while this content was on them. Raises a 400 if it was the cause."""
        if not (self._refused or self._strikes):
            return 0
        until = self._refused.get(content.digest)
        if until is not None and self._clock() < until:
            raise _refusal()
        strikes, counted_until = self._strikes.get(content.digest, (0, 0.0))
        return strikes if self._clock() < counted_until else 0

    @asynccontextmanager
    async def one_at_a_time(self, content: Content) -> AsyncIterator[None]:
        """Runs identical suspects one at a time: the verdict on the first applies to the others."""
        lock = self._locks.setdefault(content.digest, asyncio.Lock())
        async with lock:
            yield

    def judge(self, content: Content, verdict: dict[str, Any]) -> bool:
        """Records and broadcasts a verdict. Returns whether the request is the cause and must not be retried."""
        self.record(content.digest, verdict)
        self._broadcast(content.digest, verdict)
        return bool(verdict["guilty"])

    def record(self, digest: str, verdict: dict[str, Any]) -> None:
        until = self._clock() + REFUSED_S
        if verdict["guilty"]:
            self._strikes.pop(digest, None)
            _put(self._refused, digest, until)
        else:
            _put(self._strikes, digest, (verdict["strikes"], until))

    def clear(self, content: Content) -> None:
        """Removes the strikes of a request that was answered: it was not the cause."""
        self._strikes.pop(content.digest, None)


def _refusal() -> ApiError:
    minutes = REFUSED_S // 60
    message = f"This request crashed every engine that ran it. It is refused for {minutes} minutes."
    return ApiError(400, message)


def _put(table: OrderedDict[str, Any], digest: str, value: Any) -> None:
    table[digest] = value
    table.move_to_end(digest)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
