"""Choice of a replica for a request with an adapter: one that has it, as far as that is worth more than the load difference."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from strata.serving.adapters import placement
from strata.serving.gateway.prefix_routing import PrefixRouting
from strata.serving.gateway.standby import Engines
from strata.serving.routing import choice

STREAM_S = 0.1  # of one stream, as measured


def peer(name: str, busy: int, *adapters: str, load_s: float = 0.5) -> Any:
    load = {"adapters": list(adapters), "adapter_load_s": load_s}
    return SimpleNamespace(name=name, busy=busy, link=SimpleNamespace(load=load))


class Peers:
    discovered = True

    def __init__(self, *peers: Any) -> None:
        self._peers = peers

    def usable(self) -> list[Any]:
        return list(self._peers)

    def least_busy(self, without: frozenset[str] = frozenset(), cost: Any = None) -> Any:
        return choice.least_busy(self._peers, cost or (lambda peer: peer.busy), without)


def chosen(*peers: Any, adapter: str | None = "a@1", without: str = "", by_prefix: bool = False) -> str:
    async def choose() -> str:
        engines = Engines(Peers(*peers), None, PrefixRouting(64) if by_prefix else None)  # type: ignore[arg-type]
        for _ in range(3):
            engines.meter.streamed(4 * STREAM_S * 8, 8)  # a quarter of it counts
        found = engines.choose(None, frozenset([without]), adapter)
        assert found is not None
        return found.replica.name

    return asyncio.run(choose())


@pytest.mark.parametrize("by_prefix", [False, True])
def test_the_adapter_is_worth_the_time_of_its_load(by_prefix: bool) -> None:
    assert chosen(peer("has", 4, "a@1"), peer("not", 0), by_prefix=by_prefix) == "has"  # 4 streams cost 0.4 s, a load 0.5 s
    assert chosen(peer("has", 6, "a@1"), peer("not", 0), by_prefix=by_prefix) == "not"
    assert chosen(peer("has", 6, "a@1"), peer("not", 0, load_s=0.9), by_prefix=by_prefix) == "has"
    assert chosen(peer("has", 1, "a@2"), peer("not", 0), by_prefix=by_prefix) == "not"  # another revision is another adapter
    assert chosen(peer("has", 1, "a@1"), peer("not", 0), adapter=None, by_prefix=by_prefix) == "not"
    assert chosen(peer("has", 0, "a@1"), peer("not", 9), without="has", by_prefix=by_prefix) == "not"


def test_a_replica_that_reports_nothing_costs_nothing() -> None:
    assert placement.load_s("a@1", {}) == 0.0 == placement.load_s(None, {"adapter_load_s": 1.0})
