"""Jobs and teams of a queue, and a generated trace of jobs."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# Share of jobs by GPUs. Most jobs are small and most GPU-hours belong to large ones, as in the published traces (Philly, ATC
# 2019; Helios, SC 2021). The shares are round figures, not a fit.
SIZES = {1: 0.40, 2: 0.10, 4: 0.10, 8: 0.20, 16: 0.08, 32: 0.06, 64: 0.03, 128: 0.02, 256: 0.01}
LARGEST = 4  # the largest generated job has a quarter of the cluster
MEDIAN_S, SIGMA = 1800.0, 1.5  # durations are log-normal: median half an hour, mean 92 minutes before the limits below
SHORTEST_S, LONGEST_S = 60.0, 7 * 86400.0
URGENT = 0.1  # share of jobs with priority 1; the others have 0


@dataclass(frozen=True)
class Job:
    """A gang: all of its GPUs start together. `duration_s` is its run time without preemptions."""

    name: str
    team: str
    gpus: int
    submit_s: float
    duration_s: float
    priority: int = 0


@dataclass(frozen=True)
class Team:
    """A queue of a cohort, as Kueue's ClusterQueue: `quota` is its nominal quota in GPUs, `borrow` the most it may borrow beyond
    (None: everything that others leave)."""

    name: str
    quota: int
    borrow: int | None = None

    @property
    def most(self) -> float:
        return math.inf if self.borrow is None else self.quota + self.borrow


def generate(gpus: int, count: int, load: float, demand: Mapping[str, float], seed: int) -> list[Job]:
    """Poisson arrivals of jobs with the sizes and durations above. `load`: offered GPU-hours over the cluster's. `demand`:
    relative number of jobs of each team."""
    chance = random.Random(seed)
    sizes = {size: share for size, share in SIZES.items() if size <= max(1, gpus // LARGEST)}
    jobs: list[tuple[int, float, str, int]] = []
    for _ in range(count):
        size = _choose(chance, sizes)
        duration = min(LONGEST_S, max(SHORTEST_S, MEDIAN_S * math.exp(chance.gauss(0, SIGMA))))
        jobs.append((size, duration, _choose(chance, demand), int(chance.random() < URGENT)))
    # The rate follows from the work that was drawn, so the offered load of a short trace is exact too.
    work = math.fsum(size * duration for size, duration, _, _ in jobs)
    gap = work / count / (load * gpus)
    found, now = [], 0.0
    for number, (size, duration, team, priority) in enumerate(jobs):
        now += chance.expovariate(1 / gap)
        found.append(Job(f"{number:07d}", team, size, now, duration, priority))
    return found


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Jobs by submission. The order within a file does not count, also among jobs of the same second."""
    return sorted(jobs, key=lambda job: (job.submit_s, job.name, job.team, job.gpus, job.duration_s, job.priority))


def _choose(chance: random.Random, shares: Mapping[T, float]) -> T:
    return chance.choices(list(shares), list(shares.values()))[0]
