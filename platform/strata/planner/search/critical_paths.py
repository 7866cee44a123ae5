"""Chains of operations that a pipeline cannot do at the same time, for each schedule and number of micro-batches.

A pipeline takes as long as its longest chain (`simulate.py` finds it). How often each kind of pass occurs in a chain does not
depend on how long a pass takes, so the few chains here are counted once, and their lengths bound the pipeline's time from
below for every way to cut the layers. They mostly are the longest ones.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from strata.planner.catalogue.shape import Shape
from strata.planner.pipeline.schedules import parts_of
from strata.planner.search.space import Pipeline
from strata.planner.step.stages import layers_of

COVERING = ("dualpipe", "dualpipev")  # schedules in which one micro-batch's passes cover what another's say

Content = tuple[int, int, int]  # dense layers, sparse layers, and whether the head is there


class Chain(NamedTuple):
    """`passes`: how often it has, of a dense layer, a sparse one and the head, a forward pass (3 numbers), a backward pass (3),
    a pass for the weights' gradient (3) and a pass whose communication is covered (3, negative); gradients added to those of
    other micro-batches, by part of the model (1); and transfers between stages (1).

    `own` is what the stage holds that it goes through for `turns` micro-batches; none where it goes through all.
    """

    passes: tuple[float, ...]
    own: Content | None = None
    turns: float = 0.0


class Stage(NamedTuple):
    """Of stages that hold the same, the one farthest from the model's input. `before`: what lies between."""

    own: Content
    parts: int
    widest: Content  # the most of everything that one of its parts has
    before: Content
    depth: int


class Deal(NamedTuple):
    """How a pipeline deals out a model. `middle`: the part in its middle."""

    counts: list[tuple[int, int]]
    stages: tuple[Stage, ...]
    first: Content
    middle: Content

    @property
    def parts(self) -> int:
        return len(self.counts)


@lru_cache(maxsize=4096)
def deal(shape: Shape, pipeline: Pipeline) -> Deal:
    stages, schedule, chunks = pipeline
    counts = layers_of(shape, stages * chunks)
    contents = [(*count, int(part == len(counts) - 1)) for part, count in enumerate(counts)]
    found: dict[Content, Stage] = {}
    for stage in range(stages // 2 if schedule == "dualpipe" else stages):  # the other half of a dualpipe holds the same
        parts = parts_of(schedule, stages, chunks, stage)
        held = [contents[part] for part in parts]
        widest = max(one[0] for one in held), max(one[1] for one in held), max(one[2] for one in held)
        found[_sum(held)] = Stage(_sum(held), len(parts), widest, _sum(contents[:stage]), stage)
    return Deal(counts, tuple(found.values()), contents[0], contents[len(contents) // 2])


def _sum(contents: list[Content]) -> Content:
    return sum(one[0] for one in contents), sum(one[1] for one in contents), sum(one[2] for one in contents)


def chains(shape: Shape, pipeline: Pipeline, micro_batches: int) -> tuple[Chain, ...]:
    dealt = deal(shape, pipeline)
    found = [chain for stage in dealt.stages for chain in _through(stage, pipeline, micro_batches, dealt.first)]
    if pipeline.schedule == "zbv":
        found.append(_turn_of_a_v(dealt, pipeline.stages, micro_batches))
    elif pipeline.stages > 1:
        found.append(_there_and_back(shape, pipeline, dealt))
    return tuple(found)


def _through(stage: Stage, pipeline: Pipeline, m: int, first: Content) -> Iterator[Chain]:
    """Until a stage has something to do, all that it does, and what the stages before it do with its last gradient."""
    own, before, depth, p = stage.own, stage.before, stage.depth, pipeline.stages
    none = (0, 0, 0)
    lead = _passes(forward=before, transfers=depth)
    match pipeline.schedule:
        case "gpipe" | "1f1b" | "interleaved":  # the last it does is a whole backward pass
            work = _plus(lead, _times(m, _passes(own, own, own, parts=stage.parts)))
            yield Chain(_plus(work, _passes(none, before, before, parts=depth, transfers=depth)), own, m)
        case "zb-h1" | "zbv":
            work = _plus(lead, _times(m, _passes(own, own, own, parts=stage.parts)))
            yield Chain(work, own, m)
            left = min(m, depth + 1) if pipeline.schedule == "zb-h1" else _left_by_zbv(p, m, depth)
            yield Chain(_plus(work, _after_last_gradient(stage, left, first)), own, m)
        case "dualpipe" | "dualpipev":
            half, each = (p // 2, m // 2) if pipeline.schedule == "dualpipe" else (p, m)
            inwards = half - 1 - depth
            pairs = 2 * (each - 2 * half + depth + 1) + inwards - (inwards == 0)
            work = _plus(lead, _times(each, _passes(own, own, own, parts=stage.parts)))
            work = _plus(work, _times(-pairs, _passes(hidden=own)))
            yield Chain(work, own, m)
            yield Chain(_plus(work, _after_last_gradient(stage, depth + 1, first)), own, m)


def _left_by_zbv(stages: int, micro_batches: int, depth: int) -> int:
    """Weight gradients after the last gradient: of either chunk for the last `depth` micro-batches, and of one more. With few
    of them, the order is that of more, of which the last do not exist."""
    missing = max(0, 2 * stages - 1 - micro_batches)
    return max(1, max(0, depth - missing) + max(0, depth + 1 - missing))


def _turn_of_a_v(dealt: Deal, stages: int, m: int) -> Chain:
    """From the first micro-batch's way to the end of the model and back to the last stage, whose two chunks are the middle of
    the model, to the end of what that stage has left to do by then, and home."""
    contents = [(*count, int(part == dealt.parts - 1)) for part, count in enumerate(dealt.counts)]
    turn = next(stage for stage in dealt.stages if stage.depth == stages - 1)
    way = _passes(_sum(contents), _sum(contents[stages + 1 :]), transfers=3 * (stages - 1))
    work = _plus(_times(m, _passes((0, 0, 0), turn.own, turn.own, parts=2)), _times(max(0, m - stages), _passes(turn.own)))
    home = _after_last_gradient(turn, _left_by_zbv(stages, m, turn.depth), dealt.first)
    return Chain(_plus(_plus(way, work), home))


def _after_last_gradient(stage: Stage, left: int, first: Content) -> tuple[float, ...]:
    """From a stage's last gradient, after which it has at most so many weight gradients `left`, to the first stage's."""
    back = _passes(backward=stage.before, weight=first, parts=1, transfers=stage.depth)
    return _plus(back, _times(-left, _passes(weight=stage.widest, parts=1)))


def _there_and_back(shape: Shape, pipeline: Pipeline, dealt: Deal) -> Chain:
    """One micro-batch's way."""
    everything = (shape.dense_layers, shape.sparse_layers, 1)
    passes = _passes(everything, everything, dealt.first, parts=1)
    if pipeline.schedule in COVERING:
        return Chain(_plus(passes, _times(-2, _passes(hidden=everything))))
    return Chain(_plus(passes, _passes(transfers=2 * (dealt.parts - 1))))


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
