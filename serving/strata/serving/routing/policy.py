"""Policy that places a prefill on the decode engine (local) or in the prefill pool (remote). Pure functions.

Cost of a local prefill: the queue on this engine, the uncached tokens, and the delay of every other sequence on this engine,
since a step that prefills is a longer step (chunked prefill spreads the delay, its sum stays). Cost of a remote prefill: the
pool's queue, all tokens of the prompt (the cache of that engine is not known here), the KV transfer of the blocks that are
missing here, and a fixed handoff. The lower cost wins. `stall_weight` is the weight of a second of delay of another sequence.
"""

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

# Reasons that `decide` returns. Callers have more, for requests that cannot be prefilled remotely.
LOCAL = ("short", "cached", "no-prefill-engine", "prefill-busy", "cheaper-here")
ON_STANDBY = "no-decode-replica"  # prefilled and decoded on a prefill engine
REMOTE = ("cheaper-there", "long", "always")
FORGET_S = 60.0
REMOTE_TRIES = 2  # prefill engines that are tried before a prompt is prefilled on the decode engine
# Time for the engine itself to detect that the blocks it waits for were lost with their owner.
NOTICE_S = 3.0


@dataclass(frozen=True)
class Rule:
    """Settings of `serve.remote_prefill` in a recipe."""

    when: Literal["cheaper", "always"]  # always: whenever there is a prefill engine; the other settings are ignored
    min_tokens: int  # prompts with fewer uncached tokens are always local
    max_queue_s: float  # a prefill engine with a longer queue is busy
    stall_weight: float  # cost of one second of delay of one other sequence, in seconds of this request's wait


@dataclass(frozen=True)
class Prompt:
    tokens: int
    cached: int  # prefix tokens that are probably cached on this engine


@dataclass(frozen=True)
class Load:
    """Load of this decode engine."""

    running: int
    waiting: int
    queued_tokens: int  # of prompts that are not yet prefilled


@dataclass(frozen=True)
class Pool:
    engines: int
    queued_tokens: int  # on the engine with the fewest


@dataclass(frozen=True)
class Rates:
    """Measured rates; None where there are no samples yet."""

    local_tokens_per_s: float | None
    remote_tokens_per_s: float | None
    transfer_s_per_token: float | None
    handoff_s: float | None


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
    transfer, handoff = rates.transfer_s_per_token, rates.handoff_s
    if local is None or remote is None or transfer is None or handoff is None:
        return None
    # Waiting requests are ahead of this prompt: they are streams when it is prefilled, and are delayed by it.
    delayed = here.running + here.waiting
    here_s_per_token = (1 + rule.stall_weight * delayed) / local
    there_s_per_token = 1 / remote + transfer
    if here_s_per_token <= there_s_per_token:
        return False  # also with a local queue: else longer prompts would stay local while shorter ones leave
    uncached = prompt.tokens - prompt.cached
    here_s = here.queued_tokens / local + uncached * here_s_per_token
    there_s = (pool.queued_tokens + prompt.cached) / remote + uncached * there_s_per_token + handoff
    return there_s < here_s


class RateMeter:
    """Exponentially weighted mean time per unit; a sample loses half its weight every `half_life_s`.

    Each update adds the median of the last three samples, so a single outlier (a stalled prefill, a warm-up) has no effect.
    Samples must resemble what is predicted: a prompt of ten tokens does not predict one of thousands.

    The rate is known from the third sample on, until FORGET_S after the last. Without this expiry a pool whose first prefills
    were slow (because of NIXL handshakes) would stay unused: nothing is sent to a slow pool, so nothing new is measured.
    """

    def __init__(self, half_life_s: float = 30.0) -> None:
        self._half_life_s = half_life_s
        self._last: deque[float] = deque(maxlen=3)  # seconds per unit
        self._sum = self._weight = self._at = 0.0

    def add(self, amount: float, seconds: float, now: float) -> None:
        if amount <= 0 or seconds <= 0:  # the clock did not advance: no information
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
