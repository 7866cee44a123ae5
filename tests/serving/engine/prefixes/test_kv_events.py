"""KV cache events from vLLM's own publisher: received, read again after a loss, or forgotten."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventPublisherFactory, KVEventBatch

from strata.serving.engine import kv_events
from strata.serving.engine.kv_events import Endpoints, Receiver
from strata.serving.routing.kv.cached_blocks import CachedBlocks
from strata.serving.routing.kv.prefix_log import PrefixLog

B = 4
NONE = (None, None)


def batch(number: int) -> KVEventBatch:
    """Stores the block of number `number` of one sequence."""
    tokens = list(range(number * B, number * B + B))
    parent = b"%d" % (number - 1) if number else None
    return KVEventBatch(0.0, [BlockStored([b"%d" % number], parent, tokens, B, None, "GPU", None)])


class Engine:
    """vLLM's publisher and our receiver."""

    def __init__(self) -> None:
        endpoints = Endpoints()
        self.receiver = Receiver(endpoints)  # before the engine, as in a replica
        self.publisher: Any = EventPublisherFactory.create(KVEventsConfig(**endpoints.arguments()))
        self.index = CachedBlocks(B, PrefixLog())

    async def until_cached(self, tokens: int) -> None:
        async with asyncio.timeout(10):
            while self.index.cached_tokens(list(range(1000)), NONE) != tokens:
                await asyncio.sleep(0.01)


def run(test: Callable[[Engine], Awaitable[None]]) -> None:
    async def inside() -> None:
        engine = Engine()
        engine.receiver.begin(engine.index)
        try:
            await asyncio.sleep(0.2)  # until the sockets are connected
            await asyncio.wait_for(test(engine), 20)
        finally:
            engine.receiver.close()
            engine.publisher.shutdown()

    asyncio.run(inside())


def test_events_reach_the_index() -> None:
    async def test(engine: Engine) -> None:
        for number in range(3):
            engine.publisher.publish(batch(number))
        await engine.until_cached(3 * B)
        engine.publisher.publish(KVEventBatch(0.0, [BlockRemoved([b"1"], "GPU")]))
        await engine.until_cached(B)

    run(test)


def test_lost_events_are_read_again() -> None:
    async def test(engine: Engine) -> None:
        real, lost = engine.publisher._pub, {1, 2}

        class Lossy:
            def send_multipart(self, parts: tuple[bytes, bytes, bytes]) -> None:
                if int.from_bytes(parts[1], "big") not in lost:
                    real.send_multipart(parts)

            def close(self, linger: int) -> None:
                real.close(linger=linger)

        engine.publisher._pub = Lossy()
        for number in range(5):
            engine.publisher.publish(batch(number))
        await engine.until_cached(5 * B)

    run(test)


def test_index_starts_anew_without_the_lost_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_S", 0.2)

    async def test(engine: Engine) -> None:
        engine.publisher.publish(batch(0))
        await engine.until_cached(B)
        next(engine.publisher._seq_gen)  # a batch that is nowhere
        engine.publisher.publish(batch(1))
        await engine.until_cached(0)
        engine.publisher.publish(batch(0))
        await engine.until_cached(B)

    run(test)


def test_unreadable_events_are_survived() -> None:
    async def test(engine: Engine) -> None:
        engine.publisher.publish(batch(0))
        await engine.until_cached(B)
        engine.publisher.publish(KVEventBatch(0.0, [{"type": "Unknown"}]))  # type: ignore[list-item]
        await engine.until_cached(0)
        engine.publisher.publish(batch(0))
        await engine.until_cached(B)

    run(test)


def test_sockets_are_private() -> None:
    endpoints = Endpoints()
    folder = endpoints.events.removeprefix("ipc://").rpartition("/")[0]
    assert (kv_events.Path(folder).stat().st_mode & 0o777) == 0o700
    assert max(len(endpoints.events), len(endpoints.replay)) - len("ipc://") < 100
