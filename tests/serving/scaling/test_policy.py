"""Numbers of replicas: by rate and headroom, at once upwards, after the cool-down downwards, and to zero and back."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from strata.serving.scaling.demand import MOST_GROWTH, Seen
from strata.serving.scaling.policy import (
    DRAIN_S,
    LEAST_HEADROOM,
    MOST_HEADROOM,
    NEW_FADE_S,
    NEW_HEADROOM,
    Bounds,
    PoolMemory,
    decide,
)
from strata.serving.scaling.sizing import KV_FULL, Lengths

BOUNDS = Bounds(least=1, most=50, cooldown_s=600, idle_s=300)
STARTUP_S = 60.0


def rate_of(lengths: Lengths) -> float:
    return 2.0


class Run:
    """A pool under arrivals at a rate that is a function of time."""

    def __init__(self, rate: Callable[[float], float], bounds: Bounds = BOUNDS, headroom: float = MOST_HEADROOM) -> None:
        self.rate, self.bounds = rate, bounds
        self.memory = PoolMemory(headroom=headroom)
        self.now, self.arrivals, self.number = 0.0, 0.0, 1
        self.numbers: list[int] = []
        self.step_s = 1.0

    def until(self, end: float, waiting: int = 0, kv_use: float = 0.0) -> int:
        while self.now < end:
            self.now += self.step_s
            self.arrivals += self.step_s * self.rate(self.now)
            count = int(self.arrivals)
            in_flight = int(self.rate(self.now) > 0)
            look = Seen(self.now, count, count, 100 * count, 10 * count, in_flight, waiting, kv_use=kv_use)
            self.number, self.memory = decide(look, self.memory, self.bounds, self.number, STARTUP_S, rate_of)
            self.numbers.append(self.number)
        return self.number


def test_new_load_has_the_largest_headroom_and_a_steady_one_the_least() -> None:
    run = Run(lambda _: 4.0, headroom=NEW_HEADROOM)
    assert run.until(60) == pytest.approx(NEW_HEADROOM * 4 / 2, abs=1)
    run.until(NEW_FADE_S)
    assert run.memory.headroom == pytest.approx((NEW_HEADROOM + LEAST_HEADROOM) / 2, rel=0.02)
    assert run.until(6 * NEW_FADE_S) == pytest.approx(MOST_HEADROOM * 4 / 2, abs=1)
    run.step_s = 5.0
    assert run.until(12 * 3600) == pytest.approx(LEAST_HEADROOM * 4 / 2, abs=1)
    assert run.numbers[100:] == sorted(run.numbers[100:], reverse=True)


def test_new_load_is_prepared_for_bursts_over_its_mean_and_not_over_a_burst() -> None:
    run = Run(lambda t: 10.0 if 100 <= t < 110 else 1.0, headroom=NEW_HEADROOM)
    assert run.until(99) == math.ceil(NEW_HEADROOM * 1 / 2)
    assert run.until(115) <= math.ceil(MOST_HEADROOM * MOST_GROWTH * 10 / 2) and run.number >= MOST_HEADROOM * 9 / 2


def test_growth_is_at_once_and_shrinking_after_the_cool_down() -> None:
    run = Run(lambda t: 10.0 if 1000 <= t < 1100 else 2.0, headroom=LEAST_HEADROOM)
    before = run.until(999)
    high = run.until(1015)
    assert before == 2 and high >= 10
    last = max(range(len(run.numbers)), key=lambda k: (run.numbers[k], k))
    assert run.until(1099 + 590) >= 10
    run.until(3000)
    assert min(run.numbers[1000 : 1099 + 590]) >= 2 and run.numbers[2500] < high and last >= 1000


def test_headroom_is_learned_from_steps() -> None:
    """The pool was sized for 2 per second when 8 came."""
    run = Run(lambda t: 8.0 if t % 3600 >= 1800 else 2.0, headroom=LEAST_HEADROOM)
    run.until(1790)
    assert run.memory.headroom == LEAST_HEADROOM
    run.until(1830)
    assert 2.5 < run.memory.headroom < 4.0
    run.until(3600 + 1795)  # more than a cool-down after the load fell: sized for the next step
    assert run.number >= math.ceil(run.memory.headroom * 2 / 2) >= 3


def test_trend_is_followed_before_it_arrives() -> None:
    rising = Run(lambda t: 2 + t / 100, headroom=LEAST_HEADROOM)
    number = rising.until(1000)
    assert number >= math.ceil(LEAST_HEADROOM * (12 + STARTUP_S / 100) / 2)


def test_waiting_requests_and_contexts_need_replicas_too() -> None:
    waiting = Run(lambda _: 2.0, headroom=LEAST_HEADROOM)
    assert waiting.until(100, waiting=40) == math.ceil((LEAST_HEADROOM * 2 + 40 / DRAIN_S) / 2)
    full = Run(lambda _: 0.1, headroom=LEAST_HEADROOM)
    full.number = 8
    full.until(1, kv_use=1.0)
    assert full.number == math.ceil(8 / KV_FULL)
    other = Run(lambda _: 0.1, headroom=LEAST_HEADROOM)
    other.number = 8
    other.until(20, kv_use=KV_FULL)
    assert other.memory.wanted[-1][1] == 1


def test_bounds_hold() -> None:
    assert Run(lambda _: 1000.0).until(100) == 50
    assert Run(lambda _: 0.01, replace(BOUNDS, least=3)).until(2000) == 3


def test_idle_pool_is_emptied_and_the_first_request_brings_it_back() -> None:
    bounds = replace(BOUNDS, least=0)
    run = Run(lambda t: 1.0 if t < 100 or t > 1000 else 0.0, bounds)
    run.until(99)
    assert run.until(99 + 299) >= 1
    assert run.until(99 + 310) == 0 and run.until(1000) == 0
    assert run.until(1001) == 1
    assert Run(lambda t: 1.0 if t < 100 else 0.0, BOUNDS).until(2000) == 1


def test_without_step_times_the_number_stays() -> None:
    look = Seen(5.0, 100, 100, 1000, 1000, in_flight=9, waiting=0)
    assert decide(look, PoolMemory(), BOUNDS, 4, STARTUP_S, None)[0] == 4
    assert decide(look, PoolMemory(), BOUNDS, 0, STARTUP_S, None)[0] == 1
