"""Receives the KV cache events that an engine's process publishes over ZeroMQ.

Batches are numbered. A batch that was dropped on the way is read again from the publisher's buffer; where that has it no longer,
the index starts anew, and knows less than the engine has until its blocks are stored again.
"""

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from strata.serving.routing.kv.cached_blocks import Batch, CachedBlocks

logger = logging.getLogger("ray.serve")

REPLAY_S = 2.0
END_OF_REPLAY = -1


class Endpoints:
    """Sockets of one engine, in a folder of their own."""

    def __init__(self) -> None:
        # Short: the path of a socket has at most 107 characters.
        self._folder = tempfile.TemporaryDirectory(prefix="strata-kv-", dir="/tmp")
        self.events, self.replay = (f"ipc://{Path(self._folder.name) / name}" for name in ("events", "replay"))

    def arguments(self) -> dict[str, Any]:
        """For vLLM's `KVEventsConfig`."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events,
            "replay_endpoint": self.replay,
        }


class Receiver:
    """Applies the events of an engine to an index, from before the engine's start on."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._context: Any = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # unlimited: an engine sends one batch per step
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.subscribe(b"")
        self._socket.connect(endpoints.events)
        self._decoder = msgspec.msgpack.Decoder(Batch)
        self._due = 0  # number of the next batch

    def begin(self, index: CachedBlocks) -> None:
        # Referenced, or the task may be garbage collected.
        self._receiving = asyncio.get_running_loop().create_task(self._receive(index))

    async def _receive(self, index: CachedBlocks) -> None:
        while True:
            _, digits, payload = await self._socket.recv_multipart()
            if (number := int.from_bytes(digits, "big")) < self._due:  # read before, from the buffer
                continue
            try:
                if number > self._due:
                    await self._read_again(index, number)
                index.apply(self._decoder.decode(payload).events)
            except msgspec.MsgspecError:
                logger.exception("A KV cache event cannot be read; the index of the cache starts anew.")
                index.clear()
            self._due = number + 1

    async def _read_again(self, index: CachedBlocks, before: int) -> None:
        missing = [(number, payload) async for number, payload in self._replayed() if self._due <= number < before]
        if [number for number, _ in missing] == list(range(self._due, before)):
            for _, payload in missing:
                index.apply(self._decoder.decode(payload).events)
        else:
            logger.warning("KV cache events %d to %d are lost; the index of the cache starts anew.", self._due, before - 1)
            index.clear()

    async def _replayed(self) -> AsyncIterator[tuple[int, bytes]]:
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(self._endpoints.replay)
            await socket.send_multipart((b"", self._due.to_bytes(8, "big")))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLAY_S):
                    while True:
                        *_, number, payload = await socket.recv_multipart()
                        if (found := int.from_bytes(number, "big", signed=True)) == END_OF_REPLAY:
                            return
                        yield found, payload
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        self._receiving.cancel()
        self._context.destroy(linger=0)
