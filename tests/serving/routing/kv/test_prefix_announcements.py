"""Announcements of cached prefixes from a replica to a gateway's map: snapshots, changes, gaps."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from strata.serving.routing.kv import prefix_log
from strata.serving.routing.kv.prefix_log import GONE, MAX_PREFIXES, PrefixLog, Subscription, pack, unpack
from strata.serving.routing.kv.prefix_map import Gap, PrefixMap

Frame = Callable[[], Awaitable[bytes]]


def run(test: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_log, "BATCH_S", 0.0)
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


async def has_none(subscription: Subscription) -> bool:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(subscription.next(), 0.02)
    return True


def test_frames_are_read_as_written() -> None:
    entries = {0: 1, 2**64 - 1: 2**32 - 1, 5: GONE}
    assert unpack(pack(True, 7, entries)) == (True, 7, list(entries.items()))
    assert unpack(pack(False, 2**40, {})) == (False, 2**40, [])


def test_subscriber_gets_a_snapshot_and_then_the_last_state_of_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        log = PrefixLog()
        log.add(1, 128)
        subscription = log.subscribe()
        log.add(2, 256)
        assert unpack(await subscription.next()) == (True, 0, [(1, 128), (2, 256)])
        assert await has_none(subscription)
        log.add(1, 128)  # known
        log.remove(9)  # unknown
        assert await has_none(subscription)
        log.add(3, 16)
        log.remove(1)
        log.add(3, 32)
        log.remove(3)
        assert unpack(await subscription.next()) == (False, 1, [(3, GONE), (1, GONE)])
        subscription.close()
        log.add(4, 1)
        assert await has_none(subscription)

    run(test, monkeypatch)


def test_slow_subscriber_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        log = PrefixLog()
        subscription = log.subscribe()
        await subscription.next()
        for digest in range(3 * MAX_PREFIXES):
            log.add(digest, 1)
            if digest:
                log.remove(digest)
        assert unpack(await subscription.next()) == (True, 1, [(0, 1)])

    run(test, monkeypatch)


def test_map_follows_many_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random changes: the map has for every chain what the logs have."""

    async def test() -> None:
        draw, known = random.Random(0), PrefixMap()
        logs = [PrefixLog() for _ in range(70)]
        slots = [known.join() for _ in logs]
        assert slots == list(range(70))
        subscriptions = [log.subscribe() for log in logs]
        for _ in range(20):
            for slot, log, subscription in zip(slots, logs, subscriptions, strict=True):
                for digest in draw.sample(range(40), 5):
                    log.add(digest, 10 * (digest + 1)) if draw.random() < 0.6 else log.remove(digest)
                log.add(99, 5)
                if draw.random() < 0.5:
                    log.remove(99)
                if subscription._changed.is_set():
                    known.apply(slot, await subscription.next())
        for _ in range(50):
            chain = sorted(draw.sample(range(40), 6))
            wanted = {
                slot: 10 * (max(held) + 1)
                for slot, log in zip(slots, logs, strict=True)
                if (held := log.cached().keys() & set(chain))
            }
            assert known.cached_tokens(chain) == wanted
        for slot in slots:
            known.leave(slot)
        assert known.size == 0 and known.join() == 0

    run(test, monkeypatch)


def test_gap_is_noticed_and_a_snapshot_heals_it() -> None:
    known = PrefixMap()
    slot, other = known.join(), known.join()
    known.apply(other, pack(True, 0, {1: 16}))
    with pytest.raises(Gap):
        known.apply(slot, pack(False, 3, {1: 16}))  # no snapshot before it
    known.apply(slot, pack(True, 3, {1: 16, 2: 32}))
    known.apply(slot, pack(False, 4, {3: 48}))
    with pytest.raises(Gap):
        known.apply(slot, pack(False, 6, {4: 64}))
    assert known.cached_tokens([1, 2, 3, 4]) == {other: 16}, "what is known of a replica with a gap is void"
    known.apply(slot, pack(True, 0, {2: 32}))
    assert known.cached_tokens([1, 2, 3]) == {slot: 32, other: 16}


def test_snapshot_replaces_what_was_known() -> None:
    known = PrefixMap()
    slot = known.join()
    known.apply(slot, pack(True, 0, {1: 16, 2: 32}))
    known.apply(slot, pack(True, 1, {1: 16}))
    assert known.cached_tokens([1, 2]) == {slot: 16} and known.size == 1


def test_slot_of_a_replica_that_left_is_used_again_without_its_prefixes() -> None:
    known = PrefixMap()
    first, second = known.join(), known.join()
    for slot in (first, second):
        known.apply(slot, pack(True, 0, {1: 16}))
    known.leave(first)
    assert known.join() == first
    assert known.cached_tokens([1]) == {second: 16}
    with pytest.raises(Gap):
        known.apply(first, pack(False, 1, {1: 16}))  # of the replica before
