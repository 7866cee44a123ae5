"""Choice between decode and standby replicas, and readiness of the pools. Without replicas."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import virtual_time
from virtual_time import elapsed

from strata.serving.gateway.readiness import Readiness, publish_warm_up
from strata.serving.gateway.standby import Engines


class Pool:
    """Stand-in for Peers. The first replica is the least busy."""

    def __init__(self, *names: str, discovered: bool = True, healthy: bool = True, changes_after_s: float = 1e9) -> None:
        self.discovered, self._changes_after_s = discovered, changes_after_s
        self._peers = [SimpleNamespace(name=name, healthy=healthy) for name in names]
        self.cancelled = False

    def all(self) -> list[Any]:
        return self._peers

    def least_busy(self, without: frozenset[str] = frozenset()) -> Any:
        usable = [peer for peer in self._peers if peer.name not in without] or self._peers
        return usable[0] if usable else None

    async def changed(self, limit_s: float) -> None:
        try:
            await asyncio.sleep(min(limit_s, self._changes_after_s))
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.mark.parametrize(
    ("decode", "prefill", "without", "chosen"),
    [
        (Pool("d"), Pool("p"), "", "d"),
        (Pool("d", "e"), Pool("p"), "d", "e"),
        (Pool(), Pool("p"), "", "p"),  # standby
        (Pool(discovered=False), Pool("p"), "", None),  # a decode replica may be up
        (Pool("d"), Pool("p"), "d", "p"),
        (Pool("d"), Pool("p"), "dp", "d"),  # both were tried
        (Pool(), Pool("p"), "p", "p"),  # tried, and the only one
        (Pool("d"), Pool(), "d", "d"),
        (Pool(), Pool(), "", None),
        (Pool("d"), None, "", "d"),
        (Pool("d"), None, "d", "d"),
        (Pool(), None, "", None),
    ],
)
def test_standby_is_chosen_only_without_another_decode_replica(
    decode: Any, prefill: Any, without: str, chosen: str | None
) -> None:
    peer = Engines(decode, prefill).least_busy(frozenset(without))
    assert (peer and peer.name) == chosen


@pytest.mark.parametrize(
    ("decode", "prefill", "healthy"),
    [
        (Pool("d"), Pool("p"), True),
        (Pool("d", healthy=False), Pool("p"), True),
        (Pool("d"), Pool("p", healthy=False), True),
        (Pool(), Pool("p"), True),
        (Pool("d"), None, True),
        (Pool("d", healthy=False), Pool("p", healthy=False), False),
        (Pool("d", healthy=False), None, False),
        (Pool(), None, False),
    ],
)
def test_any_healthy_engine_can_answer(decode: Any, prefill: Any, healthy: bool) -> None:
    assert Engines(decode, prefill).healthy() is healthy


@pytest.mark.parametrize(("decode_s", "prefill_s", "after_s"), [(3, 7, 3), (7, 3, 3), (8, None, 8), (50, 60, 20), (50, None, 20)])
def test_a_change_of_either_pool_ends_the_wait(decode_s: float, prefill_s: float | None, after_s: float) -> None:
    async def test() -> None:
        decode = Pool(changes_after_s=decode_s)
        prefill = None if prefill_s is None else Pool(changes_after_s=prefill_s)
        await Engines(decode, prefill).changed(20)  # type: ignore[arg-type]
        assert elapsed() == pytest.approx(after_s)
        await asyncio.sleep(0)
        if prefill is not None and prefill_s != decode_s and after_s < 20:
            assert (decode if decode_s > after_s else prefill).cancelled

    virtual_time.run(test)


@pytest.mark.parametrize(
    ("decode", "prefill", "reason"),
    [
        (Pool("d"), Pool("p"), None),
        (Pool("d"), None, None),
        (Pool(), Pool("p"), "No healthy decode replica is up."),
        (Pool("d", healthy=False), None, "No healthy decode replica is up."),
        (Pool("d"), Pool(), "No healthy prefill replica is up."),
        (Pool("d"), Pool("p", healthy=False), "No healthy prefill replica is up."),
        (Pool(), Pool(), "No healthy decode replica is up."),
    ],
)
def test_every_pool_needs_a_healthy_replica(decode: Any, prefill: Any, reason: str | None) -> None:
    assert Readiness(decode, prefill).obstacle() == reason


@pytest.mark.parametrize(
    ("decode", "prefill", "reason", "at_zero"),
    [
        (Pool(), None, None, True),
        (Pool("d"), None, None, False),
        (Pool("d", healthy=False), None, "No healthy decode replica is up.", False),
        (Pool(), Pool(), "No healthy prefill replica is up.", True),
    ],
)
def test_pool_that_was_scaled_to_zero_is_ready(decode: Any, prefill: Any, reason: str | None, at_zero: bool) -> None:
    readiness = Readiness(decode, prefill, to_zero=True)
    assert readiness.obstacle() == reason and readiness.scaled_to_zero() is at_zero
    assert not Readiness(decode, prefill).scaled_to_zero()


def test_one_healthy_replica_of_a_pool_is_enough() -> None:
    pool = Pool("a", "b")
    pool.all()[0].healthy = False
    assert Readiness(pool, None).obstacle() is None  # type: ignore[arg-type]


class Directory:
    """Entries of the warm-up. It cannot be read during the `outages`, in seconds."""

    def __init__(self, *outages: tuple[float, float]) -> None:
        self.outages = outages
        self.entries: set[tuple[str, str]] = set()
        self.reads = 0

    async def names(self, role: str) -> set[str]:
        self.reads += 1
        if any(start <= elapsed() < end for start, end in self.outages):
            raise ConnectionError
        return {name for of, name in self.entries if of == role}

    async def publish(self, role: str, name: str, entry: dict[str, Any]) -> None:
        self.entries.add((role, name))


def test_readiness_waits_for_the_warm_up_and_logs_each_outage_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        directory = Directory((0, 0.5), (1.1, 2), (3.1, 4))
        directory.entries = {("warm-up", "other"), ("decode", "passed")}
        ready = Readiness(Pool("d"), None, directory)  # type: ignore[arg-type]
        for second in range(6):
            await asyncio.sleep(1)
            assert ready.obstacle() == "The warm-up has not passed yet.", second
        await publish_warm_up(directory)  # type: ignore[arg-type]
        await asyncio.sleep(0.21)
        assert ready.obstacle() is None
        reads = directory.reads
        assert 30 <= reads <= 33, "one read every 0.2 s"
        await asyncio.sleep(5)
        assert directory.reads == reads, "nothing is read after the warm-up"

    with caplog.at_level(logging.ERROR, "ray.serve"):
        virtual_time.run(test)
    assert [record.getMessage() for record in caplog.records] == 3 * ["The directory cannot be read for the warm-up; retrying."]
