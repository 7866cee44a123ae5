"""The quickest layouts on a number of GPUs, best first.

Groups of layouts are opened in the order of how quick they could be (`time_bounds.py`), then those layouts in them that fit. A
layout's pipeline is played once no other could be quicker. So the first that comes out is the quickest, and nothing was left
out that could be quicker.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import inf
from typing import NamedTuple

from strata.planner.layout import Layout, Offload, Recompute
from strata.planner.search.critical_paths import COVERING
from strata.planner.search.memory_bounds import Room
from strata.planner.search.space import Batch, Limits, Line, Pipeline, Slice, layout_of, pipelines, share_out, slices
from strata.planner.search.time_bounds import Desk
from strata.planner.step.step import Step, plan_step
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError

# Of a search, in layouts whose memory is worked out; playing a pipeline takes as long as some hundred of them. A trillion
# parameters on 100,000 GPUs take a tenth of it, and all of it half a minute.
MOST_WORK = 100_000
PLAYED_WORK = 100
WORTH_IT = 0.98  # recomputation that leaves more than this share of what layers keep is not looked at


@dataclass(frozen=True)
class Candidate:
    """`gpus` are paid for; the layout may leave some of them idle. `cost` is dollars for a million tokens. `days` and `dollars`
    are a token budget's, without what failures cost."""

    layout: Layout
    step: Step
    peak: float  # bytes, of the fullest GPU
    gpus: int
    cost: float
    days: float | None
    dollars: float | None

    @property
    def idle(self) -> int:
        return self.gpus - self.layout.gpus


class Group(NamedTuple):
    """Layouts whose layers take as long. `covering`: whether their pipelines cover communication by another's compute."""

    slice: Slice
    recompute: Recompute
    covering: bool
    work: float  # GPU-seconds for a sequence
    way: float  # seconds of a micro-batch, there and back


class Hunt:
    """`considered` counts layouts whose memory was worked out, `fitting` those of them that fit."""

    def __init__(
        self, desk: Desk, room: Room, batch: Batch, most: int, limits: Limits, memory: float, budget_tokens: float | None
    ) -> None:
        self.desk, self.room, self.batch, self.limits = desk, room, batch, limits
        self.memory, self.budget_tokens = memory, budget_tokens
        self.considered = self.fitting = self._work = 0
        ways = pipelines(desk.shape.layers, limits)
        self._pipelines = {covers: [way for way in ways if (way.schedule in COVERING) == covers] for covers in (False, True)}
        self._groups = list(self._all_groups(most))
        self._ways: dict[tuple[int, int, int, bool, int], list[tuple[Pipeline, int, int]]] = {}
        self._begun: dict[int, tuple[list[Candidate], Iterator[Candidate]]] = {}

    def quickest(self, gpus: int, keep: int) -> list[Candidate]:
        """In order. Asked for more, it goes on where it stopped."""
        found, rest = self._begun.setdefault(gpus, ([], self.best_first(gpus)))
        while len(found) < keep and (one := next(rest, None)):
            found.append(one)
        return found[:keep]

    def best_first(self, gpus: int, enough: float = inf) -> Iterator[Candidate]:
        """Only those that take at most `enough` seconds for a sequence."""
        zero, offload = self._leanest_state()
        if self.room.least_state(zero, offload, gpus) > self.memory:
            return
        number = count()
        heap: list[tuple[float, int, Group | Line | Layout | Candidate]]
        heap = [(self._least(group, gpus), next(number), group) for group in self._groups]
        heapify(heap)
        while heap:
            least, _, one = heappop(heap)
            if least > enough:
                return
            if isinstance(one, Candidate):
                yield one
                continue
            for least, part in self._open(one, gpus):
                heappush(heap, (least, next(number), part))

    def _open(self, one: Group | Line | Layout, gpus: int) -> Iterator[tuple[float, Line | Layout | Candidate]]:
        """What it consists of, and the seconds that each takes for a sequence at least."""
        if isinstance(one, Group):
            yield from self._lines(one, gpus)
        elif isinstance(one, Line):
            yield from self._layouts(one)
        else:
            candidate = self._plan(one, gpus)
            yield candidate.step.seconds / one.batch, candidate

    def _least(self, group: Group, gpus: int) -> float:
        """Seconds for a sequence: as if all GPUs had the same to do and never waited, or all that is done were one way."""
        return max(group.work / gpus, group.way / (self.batch.sequences * (1 + self.batch.slack)))

    def _all_groups(self, gpus: int) -> Iterator[Group]:
        desk, batch = self.desk, self.batch.sequences
        for slice in slices(desk.shape, desk.sequence, desk.gpu.domain, gpus, batch, self.limits):
            for recompute in self.limits.recomputes:
                if recompute == self.limits.recomputes[0] or self._saves(slice, recompute):
                    for covering in (False, True):
                        work, way = desk.least_work(slice, recompute, covering)
                        yield Group(slice, recompute, covering, work * slice.gpus / slice.micro_batch, way)

    def _saves(self, slice: Slice, recompute: Recompute) -> bool:
        """Flash attention keeps so little that its recomputation would save nothing."""
        return sum(self.room.kept(slice, recompute)) < WORTH_IT * sum(self.room.kept(slice, "none"))

    def _lines(self, group: Group, gpus: int) -> Iterator[tuple[float, Line]]:
        zero, offload = self._leanest_state()
        for pipeline, data, micro_batches in self._shared_out(group.slice, group.covering, gpus):
            line = Line(group.slice, pipeline, group.recompute, data, micro_batches)
            if self.room.least(line, zero, offload) <= self.memory:
                yield self.desk.least_pipeline(line) / (data * micro_batches * group.slice.micro_batch), line

    def _leanest_state(self) -> tuple[int, Offload]:
        return self.limits.zeros[-1], self.limits.offloads[-1]

    def _shared_out(self, slice: Slice, covering: bool, gpus: int) -> list[tuple[Pipeline, int, int]]:
        """Pipelines with their data-parallel GPUs and micro-batches, of which many slices have the same."""
        key = slice.gpus, slice.step, slice.micro_batch, covering, gpus
        if key not in self._ways:
            found = ((pipeline, share_out(self.batch, slice, pipeline, gpus)) for pipeline in self._pipelines[covering])
            self._ways[key] = [(pipeline, *shared) for pipeline, shared in found if shared]
        return self._ways[key]

    def _layouts(self, line: Line) -> Iterator[tuple[float, Layout]]:
        for layout in self._allowed(line):
            if self.room.least(line, layout.zero, layout.offload) <= self.memory:
                self.considered += 1
                self._spend(1)
                if self.room.peak(layout) <= self.memory:
                    self.fitting += 1
                    yield self.desk.least_step(line, layout.zero) / layout.batch, layout

    def _allowed(self, line: Line) -> Iterator[Layout]:
        """Where there is nobody to share with, all stages of ZeRO are one: the first that is allowed stands for them."""
        alone = line.data * line.slice.sequence * line.slice.context == 1
        for offload in self.limits.offloads:
            allowed = (layout for zero in self.limits.zeros if self.allows(layout := self.layout(line, zero, offload)))
            yield from islice(allowed, 1 if alone else None)

    def layout(self, line: Line, zero: int, offload: Offload) -> Layout:
        return layout_of(line, self.desk.precision, zero, offload)

    def allows(self, layout: Layout) -> bool:
        refuses = self.limits.refuses
        return refuses is None or refuses(self.desk.shape, layout, self.desk.sequence) is None

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MOST_WORK:
            raise UserError(
                f"{self.considered:,} layouts were looked at, and it is not yet known which is the quickest.",
                "Give --gpus numbers to choose from, such as --gpus 512,1024, or a smaller --top.",
            )

    def _plan(self, layout: Layout, gpus: int) -> Candidate:
        self._spend(PLAYED_WORK)
        desk, tokens = self.desk, self.budget_tokens
        step = plan_step(desk.shape, layout, desk.gpu, desk.fabric, desk.software, Worksheet(""), desk.sequence, desk.layers)
        cost = gpus * desk.gpu.dollars_per_hour / 3600 / step.tokens_per_s * 1e6
        days = tokens / step.tokens_per_s / 86400 if tokens else None
        return Candidate(layout, step, self.room.peak(layout), gpus, cost, days, cost * tokens / 1e6 if tokens else None)
