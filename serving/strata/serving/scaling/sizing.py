"""Request rate that one replica sustains within the SLO, by a model of its engine's steps.

In the steady state of continuous batching at `rate` requests per second, a step of `s` seconds has `rate * output * s` streams
and `rate * computed * s` prompt tokens. The step times that those numbers lead to must be `s` again. The mean inter-token
latency is this `s`, KV use follows from the streams and their contexts, and the time to first token from the queue of prompts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

# Percentile of the time to first token that must meet the SLO: of exponentially distributed values, 95% are below three means.
TAIL = 3.0
KV_FULL = 0.8  # share of the KV cache; above it, requests wait for blocks or are preempted
BUSY = 0.9  # share of the time that prompts may need; above it, queues grow without bound at any fluctuation
BISECTIONS = 30
GRID = 1.03  # lengths are rounded to powers of this, so that a small change is found in the cache


class StepTimes(Protocol):
    def step(self, sequences: float, context: float, tokens: float, pairs: float, prompts: float = 0.0, /) -> float:
        """Seconds of a step in which `sequences` decode over `context` tokens in total, and `tokens` tokens of `prompts` prompts
        are prefilled with `pairs` query-key pairs."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Slo:
    ttft_s: float
    itl_s: float


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a request."""

    prompt: float
    computed: float  # of the prompt, without those found in the prefix cache
    output: float

    def rounded(self) -> "Lengths":
        return Lengths(*(_round(value) for value in (self.prompt, self.computed, self.output)))


@dataclass(frozen=True)
class Limits:
    """Sizes of an engine."""

    kv_tokens: float
    max_sequences: int
    step_tokens: int


@dataclass(frozen=True)
class Overhead:
    """Seconds of a first token beside the engine: HTTP and tokenizer, and the hand-over from another engine."""

    request_s: float
    handoff_s: float = 0.0
    transfer_token_s: float = 0.0


@lru_cache(maxsize=4096)
def decode_rate(times: StepTimes, lengths: Lengths, limits: Limits, overhead: Overhead, slo: Slo, prefills: bool = True) -> float:
    """Most requests per second of a decode engine. `prefills`: it computes the prompts, too.

    A bound that an idle engine does not meet is left out: no number of replicas would meet it."""

    def itl(rate: float) -> bool:
        return _fixed_point(times, lengths, rate, prefills, slo.itl_s) is not None

    def contexts_fit(rate: float) -> bool:
        s = _fixed_point(times, lengths, rate, prefills, math.inf)
        if s is None:
            return False
        streams = rate * lengths.output * s
        contexts = streams * (lengths.prompt + lengths.output / 2)
        return streams <= limits.max_sequences and contexts <= KV_FULL * limits.kv_tokens

    def ttft(rate: float) -> bool:
        s = _fixed_point(times, lengths, rate, prefills, math.inf)
        return s is not None and _first_token_s(times, lengths, limits, overhead, rate, s) <= slo.ttft_s

    bounds = [itl, contexts_fit] + ([ttft] if prefills else [])
    return _largest(bounds)


@lru_cache(maxsize=4096)
def prefill_rate(times: StepTimes, lengths: Lengths, limits: Limits, overhead: Overhead, slo: Slo) -> float:
    """Most prompts per second of a prefill engine. The decode engine computes the first token after the hand-over."""
    alone = Lengths(lengths.prompt, lengths.computed, 0.0)

    def busy(rate: float) -> bool:
        return rate * _prompt_s(times, alone, limits, 0.0, 0.0) <= BUSY

    def ttft(rate: float) -> bool:
        after_s = overhead.handoff_s + overhead.transfer_token_s * lengths.prompt + slo.itl_s
        return _first_token_s(times, alone, limits, overhead, rate, 0.0) + after_s <= slo.ttft_s

    return _largest([busy, ttft])


def _step_s(times: StepTimes, lengths: Lengths, rate: float, s: float, prefills: bool) -> float:
    streams = rate * lengths.output * s
    tokens = rate * lengths.computed * s if prefills else 0.0
    # Of exponentially distributed prompts, the mean square is twice the square of the mean.
    context = streams * (lengths.prompt + lengths.output / 2)
    return times.step(streams, context, tokens, tokens * lengths.computed, tokens / lengths.computed)


def _fixed_point(times: StepTimes, lengths: Lengths, rate: float, prefills: bool, most: float) -> float | None:
    """Seconds of a steady step; None if they exceed `most`, or if no step ends in time for the requests of its own duration."""
    s = times.step(0.0, 0.0, 0.0, 0.0)
    for _ in range(60):
        found = _step_s(times, lengths, rate, s, prefills)
        if found > min(most, 1e3):
            return None
        if found <= s * (1 + 1e-6):
            return found
        # Extrapolates the geometric series of the iteration: near saturation it converges slowly.
        after = _step_s(times, lengths, rate, found, prefills)
        growth = (after - found) / (found - s)
        if growth >= 1:
            return None
        s = found + (after - found) / (1 - growth)
    return s if s <= most else None


def _prompt_s(times: StepTimes, lengths: Lengths, limits: Limits, streams: float, context: float) -> float:
    """Engine's seconds per prompt when prompts fill its steps, beside `streams` streams."""
    tokens = max(1.0, limits.step_tokens - streams)
    step_s = times.step(streams, context, tokens, tokens * lengths.computed, tokens / lengths.computed)
    return lengths.computed * step_s / tokens


def _first_token_s(times: StepTimes, lengths: Lengths, limits: Limits, overhead: Overhead, rate: float, s: float) -> float:
    streams = rate * lengths.output * s
    context = streams * (lengths.prompt + lengths.output / 2)
    each_s = _prompt_s(times, lengths, limits, streams, context)
    busy = rate * each_s
    if busy > BUSY:
        return math.inf
    own_s = times.step(streams, context, lengths.computed, lengths.computed**2 / 2, 1.0)
    # M/G/1 queue of exponentially distributed prompts.
    return overhead.request_s + s / 2 + TAIL * (busy / (1 - busy) * each_s + own_s)


def _largest(bounds: Sequence[Callable[[float], bool]]) -> float:
    low, high = 1e-6, 1.0
    bounds = [bound for bound in bounds if bound(low)]
    if not bounds:
        return low
    while high < 1e6 and all(bound(high) for bound in bounds):
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if all(bound(middle) for bound in bounds):
            low = middle
        else:
            high = middle
    return low


def _round(tokens: float) -> float:
    return GRID ** round(math.log(tokens) / math.log(GRID)) if tokens > 0 else 0.0
