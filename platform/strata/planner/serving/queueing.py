"""Queueing theory: Erlang's B and C formulas, Poisson tails and fixed points of a load.

All arrivals are Poisson. Real users arrive in bursts, so these waits are lower bounds.
"""

import math
from collections.abc import Callable


def erlang_b(servers: int, offered: float) -> float:
    """Share of time in which all servers of a loss system are busy, for any distribution of service times."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
        if blocked == 0.0:  # underflow, and so for all further servers
            break
    return blocked


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival waits in an M/M/c queue. 1 from saturation on."""
    if offered >= servers:
        return 1.0
    blocked = erlang_b(servers, offered)
    return blocked / (1 - offered / servers * (1 - blocked))


def poisson_at_most(count: int, mean: float) -> float:
    """Probability of at most `count` events. Terms more than 40 deviations from the mean underflow and are skipped."""
    if mean == 0:
        return 1.0
    far = 40 * math.sqrt(mean) + 40
    numbers = range(max(0, math.floor(mean - far)), min(count, math.ceil(mean + far)) + 1)
    return math.fsum(math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in numbers)


def settle(follows: Callable[[float], float], limit: float) -> float | None:
    """Fixed point x = follows(x) by bisection. None if it exceeds `limit`.

    `follows` must rise more slowly than x once it has crossed it, as step time does with batch size, so there is one crossing.
    """
    if follows(limit) > limit:
        return None
    low, high = 0.0, limit
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if follows(middle) > middle else (low, middle)
    return high


def smallest(enough: Callable[[int], bool], limit: int) -> int | None:
    """Smallest count from 1 to `limit` for which `enough` holds, by doubling and bisection. `enough` must be monotone."""
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
