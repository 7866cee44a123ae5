"""Choice of a decode replica by the prefixes that it has cached, its queue and its load.

Replicas announce their cached prefixes over the links. What this gateway sent counts at once; the calls of other gateways count
as streams, as of the last pong.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strata.serving.routing.kv import expected_wait, prefix_chain
from strata.serving.routing.kv.expected_wait import Chosen, CostMeter
from strata.serving.routing.kv.prefix_map import Gap, PrefixMap
from strata.serving.transport.link import PREFIXES, Kind, LinkLost, Overrun
from strata.serving.transport.peers import Peer

logger = logging.getLogger("ray.serve")

RETRY_S = 1.0  # until the next subscription to a replica that refused one
BYTES_PER_TOKEN = 4.0  # before anything was measured
SAMPLE_WEIGHT = 0.05
# A prompt whose answer is not streamed counts as queued for this many times its expected wait.
PATIENCE = 2.0
MIN_PATIENCE_S = 0.05


@dataclass(frozen=True)
class Prefix:
    """Names of a prompt's prefixes, shortest first, and the size of the prompt."""

    digests: tuple[int, ...]
    size: int  # bytes
    of_ids: bool  # the prompt is a list of token ids


def prefix_of(method: str, tree: dict[str, Any], model: str, salt: str = "") -> Prefix | None:
    chain = prefix_chain.of(method, tree, model, salt)
    if chain is None:
        return None
    return Prefix(tuple(point.digest for point in chain.points), chain.size, chain.kind == "ids")


class PrefixRouting:
    def __init__(self, max_sequences: int, clock: Callable[[], float] | None = None) -> None:
        """`max_sequences` of an engine. `follow` must be called with every decode replica that joins."""
        self._max_sequences = max_sequences
        self._loop = asyncio.get_running_loop()
        self.map = PrefixMap()
        self.meter = CostMeter(clock or self._loop.time)
        self._names: dict[int, str] = {}  # of replicas, by their slot in the map
        self._following: set[asyncio.Task[None]] = set()
        self._queued: Counter[str] = Counter()  # tokens of prompts that were sent and have no first token yet
        self._bytes_per_token = BYTES_PER_TOKEN

    def follow(self, peer: Peer) -> None:
        """Subscribes to the cached prefixes of a replica, for as long as it is connected."""
        task = self._loop.create_task(self._follow(peer))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    def join(self, name: str) -> int:
        """Slot of a replica in the map."""
        slot = self.map.join()
        self._names[slot] = name
        return slot

    async def _follow(self, peer: Peer) -> None:
        slot = self.join(peer.name)
        try:
            while peer.link.alive:
                with contextlib.suppress(LinkLost, Overrun, Gap):
                    await self._read(peer, slot)
                if peer.link.alive:
                    await asyncio.sleep(RETRY_S)
        finally:
            self.map.leave(slot)
            del self._names[slot]

    async def _read(self, peer: Peer, slot: int) -> None:
        call = peer.link.call(PREFIXES, {}, background=True)
        try:
            while True:
                kind, frame = await call.next()
                if kind != Kind.DATA:
                    return
                self.map.apply(slot, frame)
        finally:
            call.cancel()

    def choose(
        self,
        replicas: Sequence[Peer],
        prefix: Prefix | None,
        without: frozenset[str],
        further_s: Callable[[Peer], float] | None = None,
    ) -> Chosen[Peer] | None:
        names = self._names
        cached = {} if prefix is None else {names[slot]: n for slot, n in self.map.cached_tokens(prefix.digests).items()}
        known = (cached, self._queued, _busy, self.meter.costs(), self._max_sequences, without)
        return expected_wait.choose(replicas, *known, further_s=further_s)

    def sent(self, chosen: Chosen[Peer], prefix: Prefix) -> "Queued":
        """Counts a prompt as queued on the replica that it is sent to."""
        name, tokens = chosen.replica.name, max(1, self.tokens(prefix) - chosen.cached)
        self._queued[name] += tokens
        wait_s = expected_wait.wait_s(self.meter.costs(), self._queued[name], 0, self._max_sequences)
        return Queued(lambda: self._leave(name, tokens), max(MIN_PATIENCE_S, PATIENCE * wait_s))

    def _leave(self, name: str, tokens: int) -> None:
        self._queued[name] -= tokens
        if not self._queued[name]:
            del self._queued[name]

    def tokens(self, prefix: Prefix) -> int:
        """Tokens of a prompt, as far as its bytes tell."""
        return round(prefix.size / (prefix_chain.ID_BYTES if prefix.of_ids else self._bytes_per_token))

    def counted(self, prefix: Prefix, tokens: int) -> None:
        """Records the number of tokens of a prompt."""
        if tokens and not prefix.of_ids:
            self._bytes_per_token += SAMPLE_WEIGHT * (prefix.size / tokens - self._bytes_per_token)


class Queued:
    """A prompt in a replica's queue until its first token, or for a while: that of an answer that is not streamed is not seen."""

    def __init__(self, leave: Callable[[], None], limit_s: float) -> None:
        self._leave: Callable[[], None] | None = leave
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.done)

    def done(self) -> None:
        self._timer.cancel()
        if self._leave is not None:
            self._leave()
            self._leave = None


def _busy(peer: Peer) -> int:
    return peer.busy
