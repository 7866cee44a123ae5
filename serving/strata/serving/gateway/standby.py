"""Choice of the replica for a request: a decode replica, or a prefill replica while no decode replica is up.

A prefill engine has the same model and can decode a request that names no KV transfer. Prompts and streams then share one
engine and slow each other down, so it is used only when the alternative is to wait for a new decode replica.
"""

import asyncio
import time
from collections.abc import Callable

from strata.serving.adapters import placement
from strata.serving.gateway.prefix_routing import Prefix, PrefixRouting
from strata.serving.routing import choice
from strata.serving.routing.kv.expected_wait import LEAST_BUSY, Chosen, CostMeter
from strata.serving.transport.peers import Peer, Peers


class Engines:
    """Replicas of both pools, decode replicas first."""

    def __init__(self, decode: Peers, prefill: Peers | None, routing: PrefixRouting | None = None) -> None:
        """`routing`: None chooses the least busy replica."""
        self._decode, self._prefill, self.routing = decode, prefill, routing
        self.meter = routing.meter if routing is not None else CostMeter(time.monotonic)

    def choose(
        self, prefix: Prefix | None, without: frozenset[str] = frozenset(), adapter: str | None = None
    ) -> Chosen[Peer] | None:
        """Replica for a prompt that is not in `without`; one that is, if there are no others. One that has the prompt's adapter
        is preferred, as far as its further load costs less time than loading it elsewhere."""
        load_s = None if adapter is None else lambda peer: placement.load_s(adapter, peer.link.load)
        decode = self.routing.choose(self._decode.usable(), prefix, without, load_s) if self.routing is not None else None
        peer = self._or_standby(decode.replica if decode is not None else self._least_busy(without, load_s), without)
        if peer is None:
            return None
        return decode if decode is not None and peer is decode.replica else Chosen(peer, 0, LEAST_BUSY)

    def least_busy(self, without: frozenset[str] = frozenset()) -> Peer | None:
        """Least busy replica that is not in `without`; one that is, if there are no others."""
        return self._or_standby(self._decode.least_busy(without), without)

    def _least_busy(self, without: frozenset[str], load_s: Callable[[Peer], float] | None) -> Peer | None:
        if load_s is None:
            return self._decode.least_busy(without)
        stream_s = self.meter.costs().stream_s
        return self._decode.least_busy(without, lambda peer: peer.busy * stream_s + load_s(peer))

    def _or_standby(self, peer: Peer | None, without: frozenset[str]) -> Peer | None:
        prefill = self._prefill
        if prefill is None or not self._decode.discovered:
            return peer
        return choice.decode_or_standby(peer, lambda: prefill.least_busy(without), without)

    def healthy(self) -> bool:
        """True if any replica has a healthy engine."""
        pools = [pool for pool in (self._decode, self._prefill) if pool is not None]
        return any(peer.healthy for pool in pools for peer in pool.all())

    async def changed(self, limit_s: float) -> None:
        """Returns when a replica of either pool joined or left, or after `limit_s`."""
        pools = [pool for pool in (self._decode, self._prefill) if pool is not None]
        waiting = [asyncio.ensure_future(pool.changed(limit_s)) for pool in pools]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
