"""Number of replicas of a pool, from the demand on the endpoint and the rate that a replica sustains within the SLO.

The pool is sized for the forecast of the arrival rate times a headroom. It grows at once, and shrinks to the most that was wanted
during the cool-down. The headroom covers what no forecast has, such as a step: it is learned from how far arrivals exceeded the
highest forecast of the cool-down of a start-up time before, and what was learned fades over hours. With 0 as its least number a
pool is emptied after an idle time, and the first request brings a replica back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from strata.serving.scaling import demand
from strata.serving.scaling.demand import BIN_S, Memory, Seen
from strata.serving.scaling.sizing import KV_FULL, Lengths

Timed = tuple[tuple[float, float], ...]  # (time, value), in order of time
LEAST_HEADROOM, MOST_HEADROOM = 2.0, 4.0
FADE_S = 2 * 3600.0  # until half of the headroom above the least is gone
# A new load has not shown its bursts yet: it gets this much over its mean rate. Above the most that is learned, headroom fades in
# minutes.
NEW_HEADROOM, NEW_FADE_S = 8.0, 600.0
DRAIN_S = 10.0  # in which new replicas are to work off the requests that wait now


@dataclass(frozen=True)
class Bounds:
    least: int
    most: int
    cooldown_s: float = 600.0
    idle_s: float = 600.0  # until a pool whose least is 0 is emptied


@dataclass(frozen=True)
class PoolMemory:
    """State between decisions."""

    demand: Memory = field(default_factory=Memory)
    # Of the cool-down, those values that are above all later ones: the first is the highest.
    wanted: Timed = ()  # replicas
    forecasts: Timed = ()  # requests per second
    bases: Timed = ()  # highest forecasts, of the last start-up time
    headroom: float = NEW_HEADROOM
    learned_at: float = 0.0  # mark up to which arrivals were compared with bases


def decide(
    seen: Seen,
    memory: PoolMemory,
    bounds: Bounds,
    running: int,
    startup_s: float,
    rate_of: Callable[[Lengths], float] | None,
) -> tuple[int, PoolMemory]:
    """Number of replicas to have. `running` replicas serve now; another one needs `startup_s`. `rate_of` returns the requests per
    second that a replica sustains; None while its engine's times are not known."""
    past = demand.remember(memory.demand, seen)
    if bounds.least == 0 and seen.at - past.active_at >= bounds.idle_s:
        return 0, PoolMemory(replace(past, marks=past.marks[-1:]))  # what comes next is a new load
    unchanged = past.marks is memory.demand.marks and memory.forecasts
    rate = memory.forecasts[-1][1] if unchanged else demand.forecast(past, startup_s + BIN_S)
    forecasts = _recent(memory.forecasts, seen.at - bounds.cooldown_s, (seen.at, rate))
    headroom, learned_at, bases = memory.headroom, memory.learned_at, memory.bases
    if len(past.marks) > 1 and past.marks[-1][0] > learned_at:
        learned_at = past.marks[-1][0]
        headroom = _learn(headroom, past, bases, learned_at - startup_s)
        bases = (*(each for each in bases if each[0] > learned_at - startup_s - 2 * BIN_S), (learned_at, forecasts[0][1]))
    prepared = max(min(headroom, MOST_HEADROOM) * rate, headroom * demand.mean_rate(past))
    number = max(1, bounds.least, _needed(seen, past, prepared, running, rate_of))
    wanted = _recent(memory.wanted, seen.at - bounds.cooldown_s, (seen.at, number))
    return min(int(wanted[0][1]), bounds.most), PoolMemory(past, wanted, forecasts, bases, headroom, learned_at)


def _recent(values: Timed, since: float, new: tuple[float, float]) -> Timed:
    """Adds a value to those since `since`, and leaves out those that it exceeds."""
    return (*(each for each in values if each[0] > since and each[1] > new[1]), new)


def _learn(headroom: float, past: Memory, bases: Timed, then: float) -> float:
    """The faded headroom or, if larger, the excess of the last interval's arrivals over the base that was known at `then`."""
    (begin, before), (end, after) = past.marks[-2:]
    half_life_s = NEW_FADE_S if headroom > MOST_HEADROOM else FADE_S
    faded = LEAST_HEADROOM + (headroom - LEAST_HEADROOM) * math.exp2((begin - end) / half_life_s)
    known = [base for at, base in bases if at <= then]
    if not known or not known[-1]:
        return faded
    count = after - before
    surely = max(0.0, count - math.sqrt(count)) / (end - begin)  # less the chance of a Poisson process
    return max(faded, min(surely / known[-1], MOST_HEADROOM))


def _needed(seen: Seen, past: Memory, rate: float, running: int, rate_of: Callable[[Lengths], float] | None) -> int:
    # Contexts outgrow a prediction when answers become longer.
    by_kv = math.ceil(running * seen.kv_use / KV_FULL) if seen.kv_use > KV_FULL else 0
    if rate_of is None or not past.prompt:
        return max(by_kv, running)
    lengths = Lengths(past.prompt, max(1.0, past.prompt * (1 - seen.cached_share)), past.output)
    backlog = seen.waiting / DRAIN_S
    return max(by_kv, math.ceil((rate + backlog) / rate_of(lengths.rounded())))
