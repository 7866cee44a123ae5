"""Choice of the replica with the least expected time to first token. Pure functions: gateways and the simulation call them.

A prompt waits for the prompts before it and for its own uncached tokens. It also waits for, and slows down, the streams that its
replica decodes: each costs the time by which one more stream makes an answer longer, times `STALL_WEIGHT`. A request beyond the
sequences that an engine runs waits for the end of another one. So a cached prefix attracts requests until its replica is busier
than the prefix is worth, and then the prefix spreads.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from strata.serving.routing import choice
from strata.serving.routing.choice import Pick, R
from strata.serving.routing.policy import RateMeter

# Reasons of a choice: it has the longest cached prefix; one that has a longer one is too busy; none has any of it; no prefixes.
PREFIX, LOAD, NEW, LEAST_BUSY = REASONS = ("prefix", "load", "new", "least-busy")
STALL_WEIGHT = 0.25  # cost of a second of delay of a stream, in seconds of the request's wait
# Before anything was measured: a prefill of 10,000 tokens/s, and a stream that costs as much as this many prompt tokens.
TOKEN_S = 1e-4
STREAM_TOKENS = 64
MIN_SAMPLE_TOKENS = 64  # the time of a shorter prompt is mostly fixed cost
FEW_STREAMS = 8  # an engine with fewer streams is not bound by them


@dataclass(frozen=True)
class Costs:
    token_s: float  # of one prompt token
    stream_s: float  # of one stream on the same replica


class CostMeter:
    """Costs as measured in the last minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens, self._streams = RateMeter(), RateMeter()

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Records uncached tokens of a prompt and the time from its first step to its first token."""
        if tokens >= MIN_SAMPLE_TOKENS:
            self._tokens.add(tokens, seconds, self._clock())

    def streamed(self, seconds: float, streams: int) -> None:
        """Records the time from the first to the last token of an answer, with the number of streams on its replica."""
        self._streams.add(max(streams, FEW_STREAMS), seconds, self._clock())

    def costs(self) -> Costs:
        now = self._clock()
        token_s = self._tokens.seconds_each(now) or TOKEN_S
        stream_s = self._streams.seconds_each(now)
        return Costs(token_s, token_s * STREAM_TOKENS if stream_s is None else STALL_WEIGHT * stream_s)


def wait_s(costs: Costs, tokens: int, streams: int, max_sequences: int) -> float:
    """Expected wait behind `streams` requests on a replica. `tokens`: uncached ones, of the request and of prompts before it."""
    beyond = streams + 1 - max_sequences
    if beyond > 0:
        return costs.token_s * tokens + costs.stream_s * (streams + beyond / STALL_WEIGHT)
    return costs.token_s * tokens + costs.stream_s * streams


@dataclass(frozen=True)
class Chosen(Generic[R]):
    replica: R
    cached: int  # prefix tokens that the replica has, as far as known
    reason: str


def choose(
    replicas: Sequence[R],
    cached: Mapping[str, int],
    queued: Mapping[str, int],
    streams: Callable[[R], int],
    costs: Costs,
    max_sequences: int,
    without: Collection[str] = (),
    pick: Pick = random.choice,
    further_s: Callable[[R], float] | None = None,
) -> Chosen[R] | None:
    """Replica with the least expected wait that is not in `without`; one that is, if there are no others. `cached` are the prefix
    tokens and `queued` the prompt tokens before this request, by replica; zero where they are missing. `further_s`: seconds that
    a replica needs before it can begin, to load the request's adapter."""

    usable = choice.untried(replicas, without)
    if not usable:
        return None
    names = [replica.name for replica in usable]
    held = [cached.get(name, 0) for name in names] if cached else [0] * len(names)
    tokens = [queued.get(name, 0) - own for name, own in zip(names, held, strict=True)] if queued else [-own for own in held]
    waits = [wait_s(costs, each, count, max_sequences) for each, count in zip(tokens, map(streams, usable), strict=True)]
    if further_s is not None:
        waits = [wait + more for wait, more in zip(waits, map(further_s, usable), strict=True)]
    place = choice.place_of_least(waits, pick)
    own, best = held[place], max(held)
    return Chosen(usable[place], own, NEW if not best else PREFIX if own == best else LOAD)
