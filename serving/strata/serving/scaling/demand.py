"""Demand on an endpoint: what its gateways count, and the forecast of the arrival rate.

Gateways count from their start, and readers take differences, so a report that is read twice or not at all does no harm.
"""

from dataclasses import dataclass, replace

BIN_S = 5.0  # arrivals are counted in intervals of this length
TREND_S = 300.0  # the trend is a line through the intervals of this time
HALF_LIFE = 200  # requests after which a request's lengths weigh half
# A forecast beyond the highest recent rate is bounded: a line through a burst points anywhere.
MOST_GROWTH = 2.0


@dataclass(frozen=True)
class Seen:
    """State of an endpoint at a time. Counts are totals since any moment, of all gateways."""

    at: float
    arrivals: int  # requests, rejected ones included
    ended: int  # answered requests, whose tokens follow
    prompt_tokens: int
    output_tokens: int
    in_flight: int
    waiting: int  # of these, requests without a place on an engine of the pool
    cached_share: float = 0.0  # of prompt tokens, found in a prefix cache
    kv_use: float = 0.0  # of the decode engines' KV caches, on average


@dataclass(frozen=True)
class Memory:
    """Digest of what was seen so far."""

    marks: tuple[tuple[float, int], ...] = ()  # (time, arrivals) at the ends of intervals
    ended: int = 0  # totals at the last update of the means
    prompt_tokens: int = 0
    output_tokens: int = 0
    requests: float = 0.0  # weight of the means, which is what is left of the requests that ended
    prompt: float = 0.0  # mean tokens of a request; 0: none has ended yet
    output: float = 0.0
    active_at: float = 0.0  # when a request last was in flight or arrived


def remember(memory: Memory, seen: Seen) -> Memory:
    marks = memory.marks
    if marks and seen.arrivals < marks[-1][1]:  # a gateway was replaced: its counts began anew
        memory = replace(memory, ended=seen.ended, prompt_tokens=seen.prompt_tokens, output_tokens=seen.output_tokens)
        marks = ()
    active = not marks or seen.in_flight > 0 or seen.arrivals > marks[-1][1]
    if not marks:
        marks = ((seen.at, seen.arrivals),)
    elif seen.at >= marks[-1][0] + BIN_S:
        oldest = seen.at - TREND_S - BIN_S
        marks = (*(mark for mark in marks if mark[0] >= oldest), (seen.at, seen.arrivals))
    new = seen.ended - memory.ended
    requests, prompt, output = memory.requests, memory.prompt, memory.output
    if new > 0:
        # The first requests weigh no more than others: short answers end first, and would stand for all.
        left = requests * 0.5 ** (new / HALF_LIFE)
        requests = left + new
        prompt = (left * prompt + seen.prompt_tokens - memory.prompt_tokens) / requests
        output = (left * output + seen.output_tokens - memory.output_tokens) / requests
    return Memory(
        marks=marks,
        ended=seen.ended,
        prompt_tokens=seen.prompt_tokens,
        output_tokens=seen.output_tokens,
        requests=requests,
        prompt=prompt,
        output=output,
        active_at=seen.at if active else memory.active_at,
    )


def mean_rate(memory: Memory) -> float:
    """Requests per second over the time of the trend."""
    if len(memory.marks) < 2:
        return 0.0
    (begin, before), (end, after) = memory.marks[0], memory.marks[-1]
    return (after - before) / (end - begin)


def forecast(memory: Memory, ahead_s: float) -> float:
    """Requests per second to prepare for: the present rate or, if higher, the trend's `ahead_s` from now."""
    rates = [
        ((begin[0] + end[0]) / 2, (end[1] - begin[1]) / (end[0] - begin[0]))
        for begin, end in zip(memory.marks, memory.marks[1:], strict=False)
    ]
    if not rates:
        return 0.0
    at, present = rates[-1]
    if len(rates) < 3:
        return present
    mean_at = sum(time for time, _ in rates) / len(rates)
    mean = sum(rate for _, rate in rates) / len(rates)
    spread = sum((time - mean_at) ** 2 for time, _ in rates)
    slope = sum((time - mean_at) * (rate - mean) for time, rate in rates) / spread
    ahead = mean + slope * (at + BIN_S / 2 + ahead_s - mean_at)
    return max(present, min(ahead, MOST_GROWTH * max(rate for _, rate in rates)))
