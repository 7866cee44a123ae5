"""The engines that can answer a request: decode replicas, and prefill replicas while no decode replica is up.

A prefill engine has the same model and decodes a request that names no KV transfer like any other engine. Everybody is slower
then, since prompts and streams share it, so it is called only when the alternative is to wait for a new decode replica.
"""

import asyncio

from strata.serving.transport.peers import Peer, Peers


class Engines:
    """Replicas of both pools, by whether a request should go to them."""

    def __init__(self, decode: Peers, prefill: Peers | None) -> None:
        self._decode, self._prefill = decode, prefill

    def least_busy(self, without: frozenset[str] = frozenset()) -> Peer | None:
        """Of those not in `without`, unless there are no others."""
        peer = self._decode.least_busy(without)
        if self._prefill is None or not self._decode.looked or (peer is not None and peer.name not in without):
            return peer
        standby = self._prefill.least_busy(without)
        if standby is None or (peer is not None and standby.name in without):
            return peer
        return standby

    def healthy(self) -> bool:
        """Whether a request would be answered now."""
        pools = [pool for pool in (self._decode, self._prefill) if pool is not None]
        return any(peer.healthy for pool in pools for peer in pool.all())

    async def changed(self, limit_s: float) -> None:
        """Returns when replicas of either pool came or went, or after `limit_s`."""
        pools = [pool for pool in (self._decode, self._prefill) if pool is not None]
        waiting = [asyncio.ensure_future(pool.changed(limit_s)) for pool in pools]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
