"""Hangs and stragglers by a simulated clock: none in clean hours of several kinds of runs, and each planted one."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from strata.training.watchdog import deadlines
from strata.training.watchdog.deadlines import Deadline
from strata.training.watchdog.evidence import Evidence
from strata.training.watchdog.stragglers import Stragglers

WORLD, HANG_S, HOUR_S = 4, 20.0, 3600.0


def evidence(rank: int, **more: object) -> Evidence:
    one = Evidence("s", rank, WORLD, f"host-{rank}", None, 100 + rank, 0, "forward", 0, (), ("x.py:1 f",), seen_at=0.0)
    return replace(one, state="S", **more)


class Run:
    """Evidence of a run that takes `step_s` per step, evaluates, saves, and starts with a compilation."""

    def __init__(self, step_s: float, seed: int = 0, start_s: float = 60.0, marks_per_step: int = 8) -> None:
        self._step_s, self._random, self._start_s, self._marks = step_s, random.Random(seed), start_s, marks_per_step

    def looks(self, until: float) -> Iterator[tuple[float, list[Evidence]]]:
        """Time and evidence at each look. Steps vary by a third; every 50th has an evaluation, every 100th a slow checkpoint."""
        now, step, begun, marks = 0.0, 0, self._start_s, 0
        length = self._length()
        while now < until:
            now += 1.0
            while now >= begun + length:
                begun, step, length, marks = begun + length, step + 1, self._length(), marks + self._marks
            inside = int(self._marks * max(0.0, now - begun) / length)
            slow = "checkpoint" if step and step % 100 == 0 else "evaluation" if step % 50 == 0 and step else "forward"
            phase = "start" if now < self._start_s else slow
            own = tuple([self._step_s / 3] * min(20, step))
            busy = {"cpu": 0.9} if phase in deadlines.SLOW or step == 0 else {"cpu": 0.5}
            done = marks + (inside if slow == "forward" else 0)
            yield now, [evidence(r, step=step, marks=done, phase=phase, own_s=own, seen_at=now, **busy) for r in range(WORLD)]

    def _length(self) -> float:
        usual = self._step_s * self._random.uniform(0.8, 1.3)
        return usual * (20 if self._random.random() < 0.01 else 1)


@pytest.mark.parametrize("step_s", [0.05, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("seed", range(2))
def test_no_alarm_in_a_clean_hour(step_s: float, seed: int) -> None:
    deadline, stragglers = Deadline(HANG_S, 0.0), Stragglers(1.5, lambda rank: 0)
    for now, ranks in Run(step_s, seed, marks_per_step=40 if step_s > 10 else 8).looks(HOUR_S):
        jittered = [replace(one, own_s=tuple(s * random.uniform(0.9, 1.1) for s in one.own_s)) for one in ranks]
        deadline.seen(jittered, now)
        assert not deadline.passed(jittered, now), (now, deadline.silent_s(now))
        assert stragglers.seen(jittered, now) == []


def frozen(ranks: list[Evidence], now: float) -> list[Evidence]:
    return [replace(one, seen_at=now, cpu=0.01) for one in ranks]


@pytest.mark.parametrize(
    ("step_s", "change", "limit"),
    [
        (1.0, frozen, 30.0),
        (0.1, frozen, 30.0),
        (1.0, lambda ranks, now: [replace(one, seen_at=now, cpu=1.0) for one in ranks], 30.0),  # an endless loop
        (1.0, lambda ranks, now: [replace(one, seen_at=now, cpu=0.01, phase="checkpoint") for one in ranks], 30.0),
    ],
)
def test_frozen_run_is_a_hang(step_s: float, change: Callable[[list[Evidence], float], list[Evidence]], limit: float) -> None:
    deadline, last, ranks = Deadline(HANG_S, 0.0), 0.0, []
    for last, ranks in Run(step_s, start_s=5.0).looks(140 * step_s + 8):
        deadline.seen(ranks, last)
    for later in range(1, 100):
        now = last + later
        still = change(ranks, now)
        deadline.seen(still, now)
        if deadline.passed(still, now):
            assert HANG_S <= later <= limit
            return
    pytest.fail("no hang")


def test_stopped_rank_is_a_hang_before_the_first_step_too() -> None:
    deadline = Deadline(HANG_S, 0.0)
    for now in range(30):
        ranks = [evidence(rank, phase="start", seen_at=float(now), cpu=0.9) for rank in range(WORLD)]
        ranks[2] = replace(ranks[2], state="T", cpu=0.0)
        deadline.seen(ranks, now)
        assert deadline.passed(ranks, now) == (now > HANG_S)


def test_rank_without_reports_is_quiet() -> None:
    deadline = Deadline(HANG_S, 0.0)
    for now in range(30):
        deadline.seen([evidence(rank, seen_at=3.0 if rank == 1 else float(now)) for rank in range(WORLD)], now)
    assert deadline.quiet_ranks(29.0) == [1]
    deadline.seen([evidence(rank, ended="finished", seen_at=3.0) for rank in range(WORLD)], 30.0)
    assert deadline.quiet_ranks(90.0) == [], "a sentinel ends with its rank"


def test_straggler_is_named_once_with_its_factor() -> None:
    stragglers, news = Stragglers(1.5, lambda rank: 0), []
    for now in range(40):
        own = {rank: 0.25 if rank == 2 else 0.1 for rank in range(WORLD)}
        ranks = [evidence(rank, step=now, own_s=(own[rank],) * min(20, now)) for rank in range(WORLD)]
        news += [(now, slow.rank, slow.factor) for slow in stragglers.seen(ranks, now)]
    assert len(news) == 1 and news[0][1:] == (2, pytest.approx(2.5)) and news[0][0] <= 30


def test_stages_are_compared_with_themselves() -> None:
    stragglers = Stragglers(1.5, lambda rank: rank // 2)  # the second stage does twice the work
    for now in range(40):
        ranks = [evidence(rank, step=now, own_s=(0.1 * (1 + rank // 2),) * min(20, now)) for rank in range(WORLD)]
        assert stragglers.seen(ranks, now) == []
