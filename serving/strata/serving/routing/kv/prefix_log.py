"""Prefixes that a replica has cached, announced to every gateway: a snapshot first, then changes in order.

A frame has a sequence number. A gateway that misses one, or finds none before it, subscribes again and gets a new snapshot. A
gateway that reads more slowly than changes arrive gets a snapshot in their place, so a subscription's memory is bounded.
"""

import asyncio
import struct
from array import array
from collections.abc import Callable, Mapping

MAX_PREFIXES = 8192  # of a replica; the least recently used are not announced
BATCH_S = 0.01  # changes are collected this long before they are sent
_HEADER = struct.Struct("!?QI")  # snapshot, sequence number, count
GONE = 0  # tokens of a prefix that is no longer cached


class PrefixLog:
    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # of each cached prefix, by digest
        self._subscriptions: set[Subscription] = set()

    def cached(self) -> dict[int, int]:
        """Tokens of each cached prefix, by digest."""
        return dict(self._tokens)

    def add(self, digest: int, tokens: int) -> None:
        if self._tokens.get(digest) != tokens:
            self._tokens[digest] = tokens
            self._change(digest, tokens)

    def remove(self, digest: int) -> None:
        if self._tokens.pop(digest, None) is not None:
            self._change(digest, GONE)

    def _change(self, digest: int, tokens: int) -> None:
        for subscription in self._subscriptions:
            subscription.change(digest, tokens)

    def subscribe(self) -> "Subscription":
        subscription = Subscription(self._tokens, self._subscriptions.discard)
        self._subscriptions.add(subscription)
        return subscription


class Subscription:
    """Frames for one gateway."""

    def __init__(self, cached: Mapping[int, int], ended: Callable[["Subscription"], None]) -> None:
        self._cached, self._ended = cached, ended
        self._changes: dict[int, int] = {}
        self._snapshot = True
        self._sequence = 0
        self._changed = asyncio.Event()
        self._changed.set()

    def change(self, digest: int, tokens: int) -> None:
        if not self._snapshot:
            self._changes[digest] = tokens
            if len(self._changes) > 2 * MAX_PREFIXES:
                self._changes.clear()
                self._snapshot = True
        self._changed.set()

    async def next(self) -> bytes:
        """Next frame, once there is a change."""
        await self._changed.wait()
        await asyncio.sleep(BATCH_S)
        self._changed.clear()
        entries = self._cached if self._snapshot else self._changes
        frame = pack(self._snapshot, self._sequence, entries)
        self._changes, self._snapshot = {}, False
        self._sequence += 1
        return frame

    def close(self) -> None:
        self._ended(self)


def pack(snapshot: bool, sequence: int, entries: Mapping[int, int]) -> bytes:
    return (
        _HEADER.pack(snapshot, sequence, len(entries))
        + array("Q", entries.keys()).tobytes()
        + array("I", entries.values()).tobytes()
    )


def unpack(frame: bytes) -> tuple[bool, int, list[tuple[int, int]]]:
    """Snapshot flag, sequence number, and entries as (digest, tokens)."""
    snapshot, sequence, count = _HEADER.unpack_from(frame)
    digests, tokens = array("Q"), array("I")
    middle = _HEADER.size + count * digests.itemsize
    digests.frombytes(frame[_HEADER.size : middle])
    tokens.frombytes(frame[middle:])
    return snapshot, sequence, list(zip(digests, tokens, strict=True))
