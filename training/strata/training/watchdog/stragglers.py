"""Slow ranks, by the time of a step that depends on no other rank: data and forward pass.

In a whole step all ranks take as long as the slowest one. Ranks of one pipeline stage do the same work and are compared with
each other. With ZeRO-3 or tensor parallelism the forward pass waits for other ranks too, so a whole group looks slow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from strata.training.watchdog.evidence import Evidence

LEAST_STEPS = 10
LEAST_S = 10.0  # for which a rank is slow before it is named
LEAST_OWN_S = 0.005  # below, the difference is the operating system's


@dataclass(frozen=True)
class Slow:
    rank: int
    factor: float
    since: int  # step

    def sentence(self, one: Evidence) -> str:
        gpu = f", GPU {one.gpu}" if one.gpu else ""
        where = f"process {one.pid} on {one.host}{gpu}"
        return (
            f"Rank {self.rank} ({where}) is slow since step {self.since}: data and forward pass take {self.factor:.1f} times"
            " the median of the other ranks, and all ranks wait for it."
        )


class Stragglers:
    def __init__(self, factor: float, stage_of: Callable[[int], int]) -> None:
        self._factor, self._stage_of = factor, stage_of
        self._slow: dict[int, tuple[float, int]] = {}  # since when and since which step
        self.named: set[int] = set()

    def factors(self, ranks: Sequence[Evidence]) -> dict[int, float]:
        """Each rank's time over the median of the other ranks of its stage."""
        own = {one.rank: median(one.own_s) for one in ranks if len(one.own_s) >= LEAST_STEPS}
        found = {}
        for rank, seconds in own.items():
            others = [own[other] for other in own if other != rank and self._stage_of(other) == self._stage_of(rank)]
            if others:
                found[rank] = max(seconds, LEAST_OWN_S) / max(median(others), LEAST_OWN_S)
        return found

    def seen(self, ranks: Sequence[Evidence], now: float) -> list[Slow]:
        """Ranks that have become stragglers since the last call."""
        news = []
        factors, steps = self.factors(ranks), {one.rank: one.step for one in ranks}
        for rank, factor in factors.items():
            if factor < self._factor:
                self._slow.pop(rank, None)
                self.named.discard(rank)
                continue
            since, step = self._slow.setdefault(rank, (now, max(1, steps[rank] - LEAST_STEPS // 2)))
            if now - since >= LEAST_S and rank not in self.named:
                self.named.add(rank)
                news.append(Slow(rank, factor, step))
        return news
