"""Critical-path candidates of a pipeline, for each schedule and number of micro-batches.

A pipeline takes as long as its longest chain of dependent operations, which `simulate.py` finds. The number of passes of each
kind in a chain does not depend on their duration. The few chains here are therefore counted once, and the longest of them is a
lower bound on the pipeline's time for every layer time. It is mostly the critical path itself.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from strata.planner.catalogue.shape import Shape
from strata.planner.pipeline.schedules import parts_of
from strata.planner.search.space import Pipeline
from strata.planner.step.stages import layers_of

OVERLAPPING = ("dualpipe", "dualpipev")  # schedules that overlap one micro-batch's communication with another's compute

Content = tuple[int, int, int]  # dense layers, sparse layers, and whether the head is there


class CriticalPath(NamedTuple):
    """A chain of dependent operations, as counts.

    `passes` has 14 numbers: forward (3), backward (3) and weight-gradient passes (3) and passes with overlapped communication
    (3, negative), each for a dense layer, a sparse layer and the head; gradient accumulations, by part of the model (1); and
    transfers between stages (1).

    `own` is the content of the stage that the chain passes through for `micro_batches` micro-batches; None where it passes
    through all stages.
    """

    passes: tuple[float, ...]
    own: Content | None = None
    micro_batches: float = 0.0


class Stage(NamedTuple):
    """The stage farthest from the model's input among stages with equal content. `before` is the content of earlier stages."""

    own: Content
    parts: int
    widest: Content  # maximum over its parts
    before: Content
    depth: int


class Partition(NamedTuple):
    """Assignment of a model's layers to pipeline stages. `middle` is the content of the middle part."""

    counts: list[tuple[int, int]]
    stages: tuple[Stage, ...]
    first: Content
    middle: Content

    @property
    def parts(self) -> int:
        return len(self.counts)


@lru_cache(maxsize=4096)
def partition(shape: Shape, pipeline: Pipeline) -> Partition:
    stages, schedule, chunks = pipeline
    counts = layers_of(shape, stages * chunks)
    contents = [(*count, int(part == len(counts) - 1)) for part, count in enumerate(counts)]
    found: dict[Content, Stage] = {}
    for stage in range(stages // 2 if schedule == "dualpipe" else stages):  # the other half of a dualpipe holds the same
        parts = parts_of(schedule, stages, chunks, stage)
        held = [contents[part] for part in parts]
        widest = max(each[0] for each in held), max(each[1] for each in held), max(each[2] for each in held)
        found[_sum(held)] = Stage(_sum(held), len(parts), widest, _sum(contents[:stage]), stage)
    return Partition(counts, tuple(found.values()), contents[0], contents[len(contents) // 2])


def _sum(contents: list[Content]) -> Content:
    return sum(each[0] for each in contents), sum(each[1] for each in contents), sum(each[2] for each in contents)


def critical_paths(shape: Shape, pipeline: Pipeline, micro_batches: int) -> tuple[CriticalPath, ...]:
    split = partition(shape, pipeline)
    found = [path for stage in split.stages for path in _through(stage, pipeline, micro_batches, split.first)]
    if pipeline.schedule == "zbv":
        found.append(_bottom_of_a_v(split, pipeline.stages, micro_batches))
    elif pipeline.stages > 1:
        found.append(_round_trip(shape, pipeline, split))
    return tuple(found)


def _through(stage: Stage, pipeline: Pipeline, m: int, first: Content) -> Iterator[CriticalPath]:
    """Paths through one stage: its wait for the first input, all its work, and the earlier stages' work on its last gradient."""
    own, before, depth, p = stage.own, stage.before, stage.depth, pipeline.stages
    none = (0, 0, 0)
    lead = _passes(forward=before, transfers=depth)
    match pipeline.schedule:
        case "gpipe" | "1f1b" | "interleaved":  # a stage ends with a whole backward pass
            work = _plus(lead, _times(m, _passes(own, own, own, parts=stage.parts)))
            yield CriticalPath(_plus(work, _passes(none, before, before, parts=depth, transfers=depth)), own, m)
        case "zb-h1" | "zbv":
            work = _plus(lead, _times(m, _passes(own, own, own, parts=stage.parts)))
            yield CriticalPath(work, own, m)
            left = min(m, depth + 1) if pipeline.schedule == "zb-h1" else _left_by_zbv(p, m, depth)
            yield CriticalPath(_plus(work, _after_last_gradient(stage, left, first)), own, m)
        case "dualpipe" | "dualpipev":
            half, each = (p // 2, m // 2) if pipeline.schedule == "dualpipe" else (p, m)
            inwards = half - 1 - depth
            pairs = 2 * (each - 2 * half + depth + 1) + inwards - (inwards == 0)
            work = _plus(lead, _times(each, _passes(own, own, own, parts=stage.parts)))
            work = _plus(work, _times(-pairs, _passes(hidden=own)))
            yield CriticalPath(work, own, m)
            yield CriticalPath(_plus(work, _after_last_gradient(stage, depth + 1, first)), own, m)


def _left_by_zbv(stages: int, micro_batches: int, depth: int) -> int:
    """Weight-gradient passes that a ZB-V stage has left after its last input gradient.

    Both chunks of the last `depth` micro-batches are left, and one more pass. With few micro-batches the order is that of a
    larger number, without the missing ones. The count is fitted to `schedules.orders`; a test compares the two.
    """
    missing = max(0, 2 * stages - 1 - micro_batches)
    return max(1, 2 * depth + 1 - min(depth, missing) - max(0, depth + 1 + missing - stages))


def _bottom_of_a_v(split: Partition, stages: int, m: int) -> CriticalPath:
    """Path through the last stage of ZB-V, whose two chunks are the middle of the model.

    It starts with the first micro-batch's forward pass to the end of the model and its backward pass to that stage, continues
    with the stage's remaining work and ends with the backward passes to the first stage.
    """
    contents = [(*count, int(part == split.parts - 1)) for part, count in enumerate(split.counts)]
    bottom = next(stage for stage in split.stages if stage.depth == stages - 1)
    there = _passes(_sum(contents), _sum(contents[stages + 1 :]), transfers=3 * (stages - 1))
    work = _plus(_times(m, _passes((0, 0, 0), bottom.own, bottom.own, parts=2)), _times(max(0, m - stages), _passes(bottom.own)))
    back = _after_last_gradient(bottom, _left_by_zbv(stages, m, bottom.depth), split.first)
    return CriticalPath(_plus(_plus(there, work), back))


def _after_last_gradient(stage: Stage, left: int, first: Content) -> tuple[float, ...]:
    """Path from a stage's last gradient to the first stage's. The stage has at most `left` weight-gradient passes after it."""
    back = _passes(backward=stage.before, weight=first, parts=1, transfers=stage.depth)
    return _plus(back, _times(-left, _passes(weight=stage.widest, parts=1)))


def _round_trip(shape: Shape, pipeline: Pipeline, split: Partition) -> CriticalPath:
    """Forward and backward pass of one micro-batch through all stages."""
    everything = (shape.dense_layers, shape.sparse_layers, 1)
    passes = _passes(everything, everything, split.first, parts=1)
    if pipeline.schedule in OVERLAPPING:
        return CriticalPath(_plus(passes, _times(-2, _passes(hidden=everything))))
    return CriticalPath(_plus(passes, _passes(transfers=2 * (split.parts - 1))))


def _passes(
    forward: Content = (0, 0, 0),
    backward: Content = (0, 0, 0),
    weight: Content = (0, 0, 0),
    hidden: Content = (0, 0, 0),
    parts: int = 0,
    transfers: int = 0,
) -> tuple[float, ...]:
    return (*forward, *backward, *weight, *hidden, parts, transfers)


def _plus(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _times(factor: float, one: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(factor * a for a in one)
