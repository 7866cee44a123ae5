"""Load and rates of the local engine and the prefill pool, as inputs of the prefill policy."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from strata.serving.adapters import placement
from strata.serving.routing.policy import Load, Pool, RateMeter, Rates
from strata.serving.transport.peers import Peer, Peers

if TYPE_CHECKING:  # it imports vLLM
    from strata.serving.vllm_patches.engine_stats import EngineStats

# The time of a shorter prompt is mostly fixed cost, so it is no sample of a rate.
MIN_SAMPLE_TOKENS = 64
TOKENS_PER_S = 10_000.0  # of a prefill engine, before anything was measured


class PoolLoad:
    def __init__(self, stats: "EngineStats", min_tokens: int, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        """`min_tokens`: shortest prompt that may be prefilled remotely."""
        self._stats, self._clock = stats, clock
        self._min_sample_tokens = max(MIN_SAMPLE_TOKENS, min_tokens)
        self._blocks_moved = 0
        self._queued_here = 0  # prompt tokens waiting for or in prefill on this engine
        self._queued_at: Counter[str] = Counter()  # the same on prefill engines, sent by this replica
        self._local, self._remote, self._handoff = RateMeter(), RateMeter(), RateMeter()

    def here(self) -> Load:
        return Load(running=self._stats.running, waiting=self._stats.waiting, queued_tokens=self._queued_here)

    def pool(self, peers: Peers | None) -> Pool | None:
        engines = peers.all() if peers else []
        if not engines:
            return None
        return Pool(engines=len(engines), queued_tokens=min(self.queued_tokens(peer) for peer in engines))

    def moved(self, blocks: int) -> None:
        """Counts KV blocks that a request got from a prefill engine."""
        self._blocks_moved += blocks

    def moved_bytes(self, blocks: int) -> int | None:
        """Bytes of so many KV blocks, by the transfers so far: blocks of an engine have one size, which vLLM does not report.
        None before the first transfer is reported."""
        return round(blocks * self._stats.bytes_moved / self._blocks_moved) if self._stats.bytes_moved else None

    def queued_tokens(self, peer: Peer) -> int:
        """Queued tokens of a prefill engine: those sent from here, or the engine's last report if that is larger."""
        return max(self._queued_at[peer.name], int(peer.link.load.get("queued_tokens", 0)))

    def cost(self, peer: Peer, adapter: str | None) -> float:
        """Tokens before a prompt on a prefill engine. Loading the prompt's adapter counts as the tokens of that time."""
        wait_s = placement.load_s(adapter, peer.link.load)
        return self.queued_tokens(peer) + (wait_s * (self._remote.per_second(self._clock()) or TOKENS_PER_S) if wait_s else 0.0)

    def rates(self) -> Rates:
        now = self._clock()
        remote = self._remote.per_second(now)
        return Rates(
            local_tokens_per_s=self._local.per_second(now) or remote,  # assume equal engines until there are samples
            remote_tokens_per_s=remote,
            transfer_s_per_token=self._stats.transfer_s_per_token,
            handoff_s=self._handoff.seconds_each(now),
        )

    @contextmanager
    def prefilling_here(self, tokens: int) -> Iterator[None]:
        self._queued_here += tokens
        try:
            yield
        finally:
            self._queued_here -= tokens

    @contextmanager
    def prefilling_at(self, peer: Peer, tokens: int) -> Iterator[None]:
        self._queued_at[peer.name] += tokens
        self._stats.remote_prefills += 1
        try:
            yield
        finally:
            self._stats.remote_prefills -= 1
            self._queued_at[peer.name] -= tokens
            if not self._queued_at[peer.name]:
                del self._queued_at[peer.name]

    def prefilled_locally(self, first: Any) -> tuple[int, float] | None:
        """Records a local prefill. `first` is the request's first output, with the engine's timestamps. Returns the uncached
        tokens and the seconds."""
        tokens = len(first.prompt_token_ids or ()) - (first.num_cached_tokens or 0)
        clock = first.metrics
        if clock is None or not clock.scheduled_ts or not clock.first_token_ts:
            return None
        seconds = float(clock.first_token_ts - clock.scheduled_ts)
        self.record_local(tokens, seconds)
        return tokens, seconds

    def record_local(self, tokens: int, engine_s: float) -> None:
        if tokens >= self._min_sample_tokens:
            self._local.add(tokens, engine_s, self._clock())

    def prefilled_remotely(self, tokens: int, engine_s: float) -> None:
        if tokens >= self._min_sample_tokens:
            self._remote.add(tokens, engine_s, self._clock())

    def record_handoff(self, tokens: int, seconds: float) -> None:
        """Records the fixed cost of a remote prefill: from its answer to the first token here, less the transfer."""
        transfer = tokens * (self._stats.transfer_s_per_token or 0.0)
        self._handoff.add(1, max(seconds - transfer, 1e-4), self._clock())
