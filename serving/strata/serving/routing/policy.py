"""Whether a prompt is prefilled by the decode engine itself or by the prefill pool. Pure: what is known goes in, the choice
and its reason come out.

A local prefill costs the request its queue and its tokens, and it costs every other sequence on this engine as much time as
its tokens take, for a step that prefills is a longer step (in chunks the delay is spread, its sum stays). A remote prefill
costs the pool's queue, all of the prompt's tokens (what that engine has cached is not known here), the way back of the
blocks that are missing here, and a hand-over. The smaller of the two wins; `stall_weight` says how much a second of someone
else's delay counts.
"""

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

# The reasons `decide` gives. (Callers have more, for requests that are not up to it.)
LOCAL = ("short", "cached", "no-prefill-engine", "prefill-busy", "cheaper-here")
STANDING_IN = "no-decode-replica"  # on a prefill engine, which then decodes too
REMOTE = ("cheaper-there", "long", "always")
FORGET_S = 60.0


@dataclass(frozen=True)
class Rule:
    """The recipe's `serve.remote_prefill`."""

    when: Literal["cheaper", "always"]  # always: whenever there is a prefill engine, and nothing below counts
    min_tokens: int  # fewer uncached tokens than this never leave
    max_queue_s: float  # a prefill engine with more work than this ahead is busy
    stall_weight: float  # seconds of this request's wait that one second of one other sequence's delay is worth


@dataclass(frozen=True)
class Prompt:
    tokens: int
    cached: int  # tokens of its beginning that this engine is believed to have


@dataclass(frozen=True)
class Load:
    """Of this decode engine."""

    running: int
    waiting: int
    queued_tokens: int  # of prompts it has been given and not yet prefilled


@dataclass(frozen=True)
class Pool:
    engines: int
    queued_tokens: int  # on the engine with the fewest


@dataclass(frozen=True)
class Rates:
    """Measured; None until it has been."""

    local_tokens_per_s: float | None
    remote_tokens_per_s: float | None
    transfer_s_per_token: float | None
    handover_s: float | None


@dataclass(frozen=True)
class Decision:
    where: Literal["local", "remote"]
    reason: str


def decide(prompt: Prompt, here: Load, pool: Pool | None, rates: Rates, rule: Rule) -> Decision:
    if rule.when == "always" and pool is not None and pool.engines > 0:
        return Decision("remote", "always")
    uncached = prompt.tokens - prompt.cached
    if uncached < rule.min_tokens:
        return Decision("local", "short" if prompt.tokens < rule.min_tokens else "cached")
    if pool is None or pool.engines == 0:
        return Decision("local", "no-prefill-engine")
    if rates.remote_tokens_per_s is not None and pool.queued_tokens / rates.remote_tokens_per_s > rule.max_queue_s:
        return Decision("local", "prefill-busy")
    remote_is_cheaper = _remote_is_cheaper(prompt, here, pool, rates, rule)
    if remote_is_cheaper is None:
        return Decision("remote", "long")
    return Decision("remote", "cheaper-there") if remote_is_cheaper else Decision("local", "cheaper-here")


def _remote_is_cheaper(prompt: Prompt, here: Load, pool: Pool, rates: Rates, rule: Rule) -> bool | None:
    local, remote = rates.local_tokens_per_s, rates.remote_tokens_per_s
    transfer, handover = rates.transfer_s_per_token, rates.handover_s
    if local is None or remote is None or transfer is None or handover is None:
        return None
    # Those who wait are ahead of this prompt: when its turn comes they are streams, and stand still for it.
    delayed = here.running + here.waiting
    here_s_per_token = (1 + rule.stall_weight * delayed) / local
    there_s_per_token = 1 / remote + transfer
    if here_s_per_token <= there_s_per_token:
        return False  # even with a queue here: else longer prompts would stay where shorter ones leave
    uncached = prompt.tokens - prompt.cached
    here_s = here.queued_tokens / local + uncached * here_s_per_token
    there_s = (pool.queued_tokens + prompt.cached) / remote + uncached * there_s_per_token + handover
    return there_s < here_s


class RateMeter:
    """How fast something goes lately: the mean time per unit, in which a sample loses half its weight every `half_life_s`.

    What goes into the mean is the median of the last three samples, so that one stalled prefill, or the first one with its
    warm-up, moves nothing. Feed it what it is to predict: a prompt of ten tokens says little about one of thousands.

    It is known from the third sample on, and for FORGET_S after the last. Else a pool whose first prefills were slow (engines
    shake hands then) would be judged by them for ever: nobody is sent to a pool that is thought slow, so nothing is measured.
    """

    def __init__(self, half_life_s: float = 30.0) -> None:
        self._half_life_s = half_life_s
        self._last: deque[float] = deque(maxlen=3)  # seconds per unit
        self._sum = self._weight = self._at = 0.0

    def add(self, amount: float, seconds: float, now: float) -> None:
        if amount <= 0 or seconds <= 0:  # a clock that did not tick says nothing about speed
            return
        if self._last and now - self._at > FORGET_S:
            self._last.clear()
            self._sum = self._weight = 0.0
        self._last.append(seconds / amount)
        if len(self._last) < 3:
            self._at = now
            return
        decay = 0.5 ** ((now - self._at) / self._half_life_s)
        self._sum = self._sum * decay + statistics.median(self._last)
        self._weight = self._weight * decay + 1
        self._at = now

    def seconds_each(self, now: float) -> float | None:
        return self._sum / self._weight if self._weight and now - self._at <= FORGET_S else None

    def per_second(self, now: float) -> float | None:
        each = self.seconds_each(now)
        return None if each is None else 1 / each
