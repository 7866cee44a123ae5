"""Queueing theory that planning needs: waits before servers, spares that run out, and loads that settle by themselves.

All arrivals are Poisson. Users come in bursts that this does not know of: take its waits as the least there will be.
"""

import math
from collections.abc import Callable


def erlang_b(servers: int, offered: float) -> float:
    """Share of time in which all servers are taken when nobody waits; holds for any distribution of service times."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
        if blocked == 0.0:  # below the smallest number there is, and so for all further servers
            break
    return blocked


def erlang_c(servers: int, offered: float) -> float:
    """The chance that an arrival has to wait, when those that find all servers taken queue up. 1 from saturation on."""
    if offered >= servers:
        return 1.0
    blocked = erlang_b(servers, offered)
    return blocked / (1 - offered / servers * (1 - blocked))


def poisson_at_most(count: int, mean: float) -> float:
    """The chance of no more than `count` events. Terms further than 40 deviations from the mean are below the smallest number
    there is, or nothing beside 1."""
    if mean == 0:
        return 1.0
    far = 40 * math.sqrt(mean) + 40
    numbers = range(max(0, math.floor(mean - far)), min(count, math.ceil(mean + far)) + 1)
    return math.fsum(math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in numbers)


def settle(follows: Callable[[float], float], limit: float) -> float | None:
    """The load x that brings itself about: x = follows(x). None if it grows past `limit`.

    `follows` must rise more slowly than x once it has crossed it, as step time does with batch size: there is one crossing.
    """
    if follows(limit) > limit:
        return None
    low, high = 0.0, limit
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if follows(middle) > middle else (low, middle)
    return high


def smallest(enough: Callable[[int], bool], limit: int) -> int | None:
    """The least count from 1 to `limit` that is enough, where every larger one is enough too."""
    high = 1
    while not enough(high):
        if high >= limit:
            return None
        high = min(2 * high, limit)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
