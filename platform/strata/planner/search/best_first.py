"""Best-first search over parallel layouts, ordered by a lower bound on step time.

A priority queue holds groups, families and layouts by their lower bound (`time_bounds.py`). The entry with the lowest bound is
expanded: a group into families, a family into the layouts that fit, a layout into a candidate whose pipeline has been
simulated. A candidate at the head of the queue is therefore the fastest that remains, and pruning is exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import inf
from typing import NamedTuple

from strata.planner.layout import Layout, Offload, Recompute
from strata.planner.search.critical_paths import OVERLAPPING
from strata.planner.search.memory_bounds import MemoryBounds
from strata.planner.search.space import Batch, Family, Limits, Pipeline, Slice, divide_batch, layout_of, pipelines, slices
from strata.planner.search.time_bounds import TimeBounds
from strata.planner.step.step import Step, plan_step
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError

# Limit of a search. The unit is one memory computation; simulating a pipeline costs about a hundred. A search for a trillion
# parameters on 100,000 GPUs uses a tenth of the limit, and the whole limit takes half a minute.
MOST_WORK = 100_000
SIMULATION_WORK = 100
WORTH_IT = 0.98  # skip a recompute mode that leaves more than this share of the activations


@dataclass(frozen=True)
class Candidate:
    """A layout with its simulated step.

    `gpus` are paid for; the layout may leave some of them idle. `cost` is in dollars per million tokens. `days` and `dollars`
    are for the token budget, without failures.
    """

    layout: Layout
    step: Step
    peak: float  # bytes on the fullest GPU
    gpus: int
    cost: float
    days: float | None
    dollars: float | None

    @property
    def idle(self) -> int:
        return self.gpus - self.layout.gpus


class Group(NamedTuple):
    """Layouts with the same time per layer.

    `overlapping`: their schedules overlap the communication of one micro-batch with the compute of another.
    """

    slice: Slice
    recompute: Recompute
    overlapping: bool
    work: float  # GPU-seconds per sequence
    round_trip: float  # seconds from the first stage to the last and back, for one micro-batch


class BestFirst:
    """Search state. `considered` counts the layouts whose memory was computed, `fitting` the layouts that fit."""

    def __init__(
        self,
        time_bounds: TimeBounds,
        memory_bounds: MemoryBounds,
        batch: Batch,
        most: int,
        limits: Limits,
        memory: float,
        budget_tokens: float | None,
    ) -> None:
        self.time_bounds, self.memory_bounds, self.batch, self.limits = time_bounds, memory_bounds, batch, limits
        self.memory, self.budget_tokens = memory, budget_tokens
        self.considered = self.fitting = self._work = 0
        every = pipelines(time_bounds.shape.layers, limits)
        self._pipelines = {
            overlaps: [each for each in every if (each.schedule in OVERLAPPING) == overlaps] for overlaps in (False, True)
        }
        self._groups = list(self._all_groups(most))
        self._divided: dict[tuple[int, int, int, bool, int], list[tuple[Pipeline, int, int]]] = {}
        self._begun: dict[int, tuple[list[Candidate], Iterator[Candidate]]] = {}

    def fastest(self, gpus: int, keep: int) -> list[Candidate]:
        """Return the `keep` fastest candidates in order. A call with a larger `keep` resumes the search."""
        found, rest = self._begun.setdefault(gpus, ([], self.in_order(gpus)))
        while len(found) < keep and (one := next(rest, None)):
            found.append(one)
        return found[:keep]

    def in_order(self, gpus: int, enough: float = inf) -> Iterator[Candidate]:
        """Iterate over candidates by increasing time, up to `enough` seconds per sequence."""
        zero, offload = self._smallest_state()
        if self.memory_bounds.least_state(zero, offload, gpus) > self.memory:
            return
        number = count()
        heap: list[tuple[float, int, Group | Family | Layout | Candidate]]
        heap = [(self._least(group, gpus), next(number), group) for group in self._groups]
        heapify(heap)
        while heap:
            least, _, one = heappop(heap)
            if least > enough:
                return
            if isinstance(one, Candidate):
                yield one
                continue
            for least, part in self._expand(one, gpus):
                heappush(heap, (least, next(number), part))

    def _expand(self, one: Group | Family | Layout, gpus: int) -> Iterator[tuple[float, Family | Layout | Candidate]]:
        """Expand an entry of the queue: its parts, each with a lower bound in seconds per sequence."""
        if isinstance(one, Group):
            yield from self._families(one, gpus)
        elif isinstance(one, Family):
            yield from self._layouts(one)
        else:
            candidate = self._plan(one, gpus)
            yield candidate.step.seconds / one.batch, candidate

    def _least(self, group: Group, gpus: int) -> float:
        """Lower bound in seconds per sequence: all GPUs busy without a bubble, or one micro-batch's round trip per step."""
        return max(group.work / gpus, group.round_trip / (self.batch.sequences * (1 + self.batch.slack)))

    def _all_groups(self, gpus: int) -> Iterator[Group]:
        bounds, batch = self.time_bounds, self.batch.sequences
        for slice in slices(bounds.shape, bounds.sequence, bounds.gpu.domain, gpus, batch, self.limits):
            for recompute in self.limits.recomputes:
                if recompute == self.limits.recomputes[0] or self._saves(slice, recompute):
                    for overlapping in (False, True):
                        work, round_trip = bounds.least_work(slice, recompute, overlapping)
                        yield Group(slice, recompute, overlapping, work * slice.gpus / slice.micro_batch, round_trip)

    def _saves(self, slice: Slice, recompute: Recompute) -> bool:
        """True if recomputation saves memory. With flash attention, selective recompute saves almost nothing."""
        activations = self.memory_bounds.layer_activations
        return sum(activations(slice, recompute)) < WORTH_IT * sum(activations(slice, "none"))

    def _families(self, group: Group, gpus: int) -> Iterator[tuple[float, Family]]:
        zero, offload = self._smallest_state()
        for pipeline, data, micro_batches in self._divisions(group.slice, group.overlapping, gpus):
            family = Family(group.slice, pipeline, group.recompute, data, micro_batches)
            if self.memory_bounds.least(family, zero, offload) <= self.memory:
                yield self.time_bounds.least_pipeline(family) / (data * micro_batches * group.slice.micro_batch), family

    def _smallest_state(self) -> tuple[int, Offload]:
        return self.limits.zeros[-1], self.limits.offloads[-1]

    def _divisions(self, slice: Slice, overlapping: bool, gpus: int) -> list[tuple[Pipeline, int, int]]:
        """Pipelines with their data-parallel size and number of micro-batches; cached, since many slices have the same."""
        key = slice.gpus, slice.step, slice.micro_batch, overlapping, gpus
        if key not in self._divided:
            found = ((pipeline, divide_batch(self.batch, slice, pipeline, gpus)) for pipeline in self._pipelines[overlapping])
            self._divided[key] = [(pipeline, *shared) for pipeline, shared in found if shared]
        return self._divided[key]

    def _layouts(self, family: Family) -> Iterator[tuple[float, Layout]]:
        for layout in self._allowed(family):
            if self.memory_bounds.least(family, layout.zero, layout.offload) <= self.memory:
                self.considered += 1
                self._spend(1)
                if self.memory_bounds.peak(layout) <= self.memory:
                    self.fitting += 1
                    yield self.time_bounds.least_step(family, layout.zero) / layout.batch, layout

    def _allowed(self, family: Family) -> Iterator[Layout]:
        """Layouts of a family that the limits allow.

        All ZeRO stages are equal where there is one data-parallel rank, so only the first allowed stage is used.
        """
        alone = family.data * family.slice.sequence * family.slice.context == 1
        for offload in self.limits.offloads:
            allowed = (layout for zero in self.limits.zeros if self.allows(layout := self.layout(family, zero, offload)))
            yield from islice(allowed, 1 if alone else None)

    def layout(self, family: Family, zero: int, offload: Offload) -> Layout:
        return layout_of(family, self.time_bounds.precision, zero, offload)

    def allows(self, layout: Layout) -> bool:
        refuses = self.limits.refuses
        return refuses is None or refuses(self.time_bounds.shape, layout, self.time_bounds.sequence) is None

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MOST_WORK:
            raise UserError(
                f"The search stopped after {self.considered:,} layouts, before the fastest was certain.",
                "List the GPU counts to choose from, such as --gpus 512,1024, or use a smaller --top.",
            )

    def _plan(self, layout: Layout, gpus: int) -> Candidate:
        self._spend(SIMULATION_WORK)
        bounds, tokens = self.time_bounds, self.budget_tokens
        step = plan_step(
            bounds.shape, layout, bounds.gpu, bounds.fabric, bounds.software, Worksheet(""), bounds.sequence, bounds.layers
        )
        cost = gpus * bounds.gpu.dollars_per_hour / 3600 / step.tokens_per_s * 1e6
        days = tokens / step.tokens_per_s / 86400 if tokens else None
        return Candidate(layout, step, self.memory_bounds.peak(layout), gpus, cost, days, cost * tokens / 1e6 if tokens else None)
