"""Search space of parallel layouts: powers of two and divisors, since only they divide a model and a machine evenly."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import ceil, gcd
from typing import NamedTuple

from strata.planner.catalogue.shape import Shape
from strata.planner.layout import Layout, Offload, Recompute, Schedule, TrainingPrecision
from strata.planner.pipeline.schedules import refusal
from strata.planner.recipes import layout_problem

MOST_STAGES = 64  # the most published (arXiv 2104.04473); with more, stages of one or two layers are mostly bubble
MOST_TOKENS = 32768  # of a micro-batch on a GPU; a quarter of that saturates the largest matrix products
FEWEST_TOKENS = 1024  # per GPU where a sequence is split
MOST_CHUNKS = 8  # of an interleaved stage
# A batch in tokens may be this much larger or smaller, so that odd GPU counts divide it.
SLACK = 0.05
TRIES = 24  # micro-batch counts to try for such a batch


@dataclass(frozen=True)
class Limits:
    """Allowed values of each dimension, ordered so that the last needs the least memory. `refuses` returns the reason against a
    layout, or None."""

    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "dualpipev")
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    offloads: tuple[Offload, ...] = ("none",)
    sequence_parallel: tuple[bool, ...] = (False, True)
    rings: bool = True
    refuses: Callable[[Shape, Layout, int], str | None] | None = None


ANYTHING = Limits()
STRATA = Limits(schedules=("1f1b", "dualpipev"), sequence_parallel=(False,), rings=False, refuses=layout_problem)


class Slice(NamedTuple):
    """Division of one layer of one micro-batch over GPUs. With the recompute mode, it determines the layer's time."""

    tensor: int
    sequence_parallel: bool
    sequence: int
    context: int
    micro_batch: int
    expert: int

    @property
    def gpus(self) -> int:
        """GPUs that hold one sequence of one stage."""
        return self.tensor * self.sequence * self.context

    @property
    def step(self) -> int:
        """Divisor of the data-parallel size that expert parallelism requires."""
        return self.expert // gcd(self.expert, self.sequence * self.context)


class Pipeline(NamedTuple):
    stages: int
    schedule: Schedule
    chunks: int


class Family(NamedTuple):
    """Layouts that differ only in ZeRO stage and offload."""

    slice: Slice
    pipeline: Pipeline
    recompute: Recompute
    data: int
    micro_batches: int


class Batch(NamedTuple):
    """Global batch. `slack` is the relative deviation allowed."""

    sequences: int
    slack: float = 0.0


def layout_of(family: Family, precision: TrainingPrecision, zero: int = 0, offload: Offload = "none") -> Layout:
    slice, pipeline = family.slice, family.pipeline
    return Layout(
        data=family.data,
        tensor=slice.tensor,
        pipeline=pipeline.stages,
        sequence=slice.sequence,
        context=slice.context,
        expert=slice.expert,
        schedule=pipeline.schedule,
        interleave=pipeline.chunks,
        zero=zero,
        micro_batch=slice.micro_batch,
        batch=family.data * slice.micro_batch * family.micro_batches,
        recompute=family.recompute,
        offload=offload,
        sequence_parallel=slice.sequence_parallel,
        precision=precision,
    )


def slices(shape: Shape, sequence: int, domain: int, gpus: int, batch: int, limits: Limits) -> Iterator[Slice]:
    """Slices to search. A sequence is split over heads (Ulysses) or in a ring, not both.

    A split sequence is a micro-batch by itself: two GPUs that split two sequences would communicate less with one each.
    """
    for tensor in _powers(min(domain, gpus)):
        if shape.heads % tensor or (shape.kv_heads % tensor and tensor % shape.kv_heads):
            continue
        for parallel in limits.sequence_parallel if tensor > 1 else (False,):
            for ulysses, ring, size in _sequence_splits(shape, sequence, tensor, gpus // tensor, batch, limits):
                for expert in _divisors(shape.experts.count) if shape.experts else (1,):
                    if tensor * expert <= gpus:
                        yield Slice(tensor, parallel, ulysses, ring, size, expert)


def _sequence_splits(
    shape: Shape, sequence: int, tensor: int, most: int, batch: int, limits: Limits
) -> Iterator[tuple[int, int, int]]:
    """Ulysses size, ring size and sequences per micro-batch."""
    for size in _powers(batch):
        if size == 1 or size * sequence <= MOST_TOKENS:
            yield 1, 1, size
    for sharers in _powers(min(most, sequence // FEWEST_TOKENS)):
        if sharers > 1 and sequence % sharers == 0:
            if shape.heads // tensor % sharers == 0:
                yield sharers, 1, 1
            if limits.rings:
                yield 1, sharers, 1


def pipelines(layers: int, limits: Limits) -> list[Pipeline]:
    found = [Pipeline(1, "1f1b", 1)]
    most = min(layers, MOST_STAGES)
    for stages in sorted({*_powers(most), *(divisor for divisor in _divisors(layers) if divisor <= most)} - {1}):
        for schedule in limits.schedules:
            for chunks in _chunks(schedule, layers // stages):
                if stages * chunks <= layers and not (schedule == "dualpipe" and stages % 2):
                    found.append(Pipeline(stages, schedule, chunks))
    return found


def _chunks(schedule: Schedule, layers: int) -> tuple[int, ...]:
    if schedule == "interleaved":
        return tuple(n for n in range(2, MOST_CHUNKS + 1) if layers % n == 0 or n & (n - 1) == 0)
    return (2,) if schedule in ("zbv", "dualpipev") else (1,)


def divide_batch(batch: Batch, slice: Slice, pipeline: Pipeline, gpus: int) -> tuple[int, int] | None:
    """Largest data-parallel size that divides the batch, and its number of micro-batches; None if there is none."""
    most = gpus // (slice.gpus * pipeline.stages)
    if most < slice.step:
        return None
    most -= most % slice.step
    for micro_batches in _numbers(batch, slice.micro_batch, most, pipeline):
        data = batch.sequences / (slice.micro_batch * micro_batches)
        ranks = min(most, max(1, round(data / slice.step)) * slice.step)
        if abs(ranks / data - 1) <= batch.slack:
            return ranks, micro_batches
    return None


@lru_cache(maxsize=2**16)
def _numbers(batch: Batch, micro_batch: int, most: int, pipeline: Pipeline) -> tuple[int, ...]:
    """Micro-batch counts to try, from the smallest that `most` data-parallel ranks allow."""
    fewest = max(1, ceil(batch.sequences * (1 - batch.slack) / (micro_batch * most)))
    if batch.slack == 0:
        whole, rest = divmod(batch.sequences, micro_batch)
        return tuple(n for n in (() if rest else _divisors(whole)) if n >= fewest and _runs(pipeline, n))
    some = range(fewest, fewest + TRIES + 2 * pipeline.stages)
    return tuple(islice((number for number in some if _runs(pipeline, number)), TRIES))


@lru_cache(maxsize=2**16)
def _runs(pipeline: Pipeline, micro_batches: int) -> bool:
    return pipeline.stages == 1 or refusal(pipeline.schedule, pipeline.stages, micro_batches, pipeline.chunks) is None


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << exponent for exponent in range(max(0, most).bit_length()))
