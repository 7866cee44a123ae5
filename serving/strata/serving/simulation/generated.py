"""Generated loads: arrival times, lengths of prompts and answers, and conversations that repeat their history."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

import numpy as np

from strata.serving.simulation.requests import OwnText, Request

Arrivals = Literal["poisson", "bursts", "diurnal", "steps", "ramp", "night"]
Timed = Iterator[tuple[float, Request]]

# Bursts of five times the rate between them; both last exponentially distributed times with these means.
BURST_S, CALM_S, BURST_FACTOR = 10.0, 60.0, 5.0
# The rate of a day: a sine around the mean, from 0.2 to 1.8 of it.
DAY_S, DAY_SWING = 86_400.0, 0.8
# Every hour the rate jumps between 0.5 and 1.5 of the mean.
STEP_S, STEP_SWING = 3600.0, 0.5
# The rate of a ramp rises from 0 to twice the mean within this time, and falls back at once.
RAMP_S = 3600.0
# A third of each day without requests; then the rate rises and falls as half a sine.
NIGHT_S = DAY_S / 3
BATCH = 4096  # random numbers drawn at a time


@dataclass(frozen=True)
class Shape:
    """Requests of a generated load. `variation` is the standard deviation of lengths over their mean, of a gamma distribution.
    The first `shared` tokens of every prompt are one of `openings` system prompts, in addition to `prompt`. A conversation has
    `turns` requests; each repeats all before it and follows after `think_s`, exponentially distributed."""

    prompt: int
    output: int
    variation: float = 1.0
    shared: int = 0
    openings: int = 1
    turns: int = 1
    think_s: float = 10.0


def open_loop(
    arrivals: Arrivals, rate: float, requests: int | None, shape: Shape, block_size: int, seed: int, until_s: float = math.inf
) -> Timed:
    """`requests` requests at `rate` per second on average, or all that begin before `until_s`. Whole conversations begin at the
    rate over their turns."""
    times = arrival_times(arrivals, rate / shape.turns, np.random.default_rng((seed, 0)))
    conversations = _Conversations(shape, block_size, seed)
    left = math.inf if requests is None else requests
    for at in times:
        if left <= 0 or at >= until_s:
            return
        yield at, conversations.first(int(min(left, shape.turns)))
        left -= shape.turns


def closed_loop(concurrency: int, requests: int, shape: Shape, block_size: int, seed: int) -> Timed:
    """Clients that send their next request as soon as the last was answered, `requests` in total. Their prompts share nothing
    but their openings."""
    conversations = _Conversations(shape, block_size, seed)
    left = requests

    def following() -> tuple[float, Request] | None:
        nonlocal left
        if not left:
            return None
        left -= 1
        request = conversations.first(1)
        request.then = following
        return 0.0, request

    for first in islice(iter(following, None), concurrency):
        assert first is not None
        yield first


def arrival_times(kind: Arrivals, rate: float, random: np.random.Generator) -> Iterator[float]:
    """Endless arrival times of a Poisson process, whose rate changes over time but for `poisson`."""
    match kind:
        case "poisson":
            return _thinned(rate, lambda _: 1.0, random)
        case "diurnal":
            share = 1 + DAY_SWING
            return _thinned(rate * share, lambda at: (1 + DAY_SWING * math.sin(2 * math.pi * at / DAY_S)) / share, random)
        case "steps":
            share = (1 - STEP_SWING) / (1 + STEP_SWING)
            return _thinned(rate * (1 + STEP_SWING), lambda at: 1.0 if at // STEP_S % 2 else share, random)
        case "ramp":
            return _thinned(2 * rate, lambda at: at / RAMP_S % 1, random)
        case "night":
            most = rate * math.pi / 2 * DAY_S / (DAY_S - NIGHT_S)  # the mean of half a sine is 2 / pi
            return _thinned(most, lambda at: _daylight(at % DAY_S), random)
        case "bursts":
            mean = (BURST_S * BURST_FACTOR + CALM_S) / (BURST_S + CALM_S)  # of the rates, in units of the calm one
            return _thinned(rate * BURST_FACTOR / mean, _phases(random), random)


def _daylight(at: float) -> float:
    return math.sin(math.pi * (at - NIGHT_S) / (DAY_S - NIGHT_S)) if at > NIGHT_S else 0.0


def _thinned(most: float, share: Callable[[float], float], random: np.random.Generator) -> Iterator[float]:
    """Poisson arrivals at rate `most`, of which the share `share(time)` remains."""
    now = 0.0
    while True:
        gaps, draws = random.exponential(1 / most, BATCH).tolist(), random.random(BATCH).tolist()
        for gap, drawn in zip(gaps, draws, strict=True):
            now += gap
            if drawn < share(now):
                yield now


def _phases(random: np.random.Generator) -> Callable[[float], float]:
    """Share of the burst's rate at a time; called with rising times."""
    state = {"bursting": False, "until": random.exponential(CALM_S)}

    def share(at: float) -> float:
        while at >= state["until"]:
            state["bursting"] = not state["bursting"]
            state["until"] += random.exponential(BURST_S if state["bursting"] else CALM_S)
        return 1.0 if state["bursting"] else 1 / BURST_FACTOR

    return share


class _Conversations:
    def __init__(self, shape: Shape, block_size: int, seed: int) -> None:
        self._shape, self._shared_blocks = shape, shape.shared // block_size
        random = np.random.default_rng((seed, 1))
        self._prompts = lengths(shape.prompt, shape.variation, random)
        self._outputs = lengths(shape.output, shape.variation, random)
        self._random = random
        self._texts = self._requests = 0

    def first(self, turns: int) -> Request:
        """First request of a conversation. All of it is drawn now, so that a load does not depend on the answers' times."""
        shape = self._shape
        opening = int(self._random.integers(shape.openings)) if shape.openings > 1 else 0
        self._texts += 1
        text = OwnText(self._texts, opening, self._shared_blocks)
        drawn = [(next(self._prompts), next(self._outputs)) for _ in range(turns)]
        pauses = self._random.exponential(shape.think_s, turns - 1).tolist() if turns > 1 else []
        history = shape.shared
        requests = []
        for prompt, output in drawn:
            self._requests += 1
            requests.append(Request(self._requests, history + prompt, output, text))
            history += prompt + output
        for request, pause, following in zip(requests, pauses, requests[1:], strict=False):
            request.then = partial(_after, pause, following)
        return requests[0]


def _after(pause: float, following: Request) -> tuple[float, Request]:
    return pause, following


def lengths(mean: int, variation: float, random: np.random.Generator) -> Iterator[int]:
    """Token counts of at least 1."""
    while True:
        if not variation:
            yield mean
            continue
        shape = 1 / variation**2
        yield from np.maximum(1, np.rint(random.gamma(shape, mean / shape, BATCH))).astype(int).tolist()
