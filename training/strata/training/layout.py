"""Coordinates of ranks in a parallel layout, and the nearest layout that works. Needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import log2
from typing import get_args

from pydantic import ValidationError

from strata.platform.errors import UserError
from strata.platform.layout_rules import largest, recipe_problem
from strata.platform.recipe import ModelSection, Offload, ParallelSection, Schedule, TrainSection

OFFLOADS = get_args(Offload)


@dataclass(frozen=True)
class Place:
    """A rank's coordinates. Tensor-parallel peers are neighbours, as their traffic needs the fastest links."""

    stage: int
    data: int
    sequence: int
    tensor: int


def place(rank: int, parallel: ParallelSection) -> Place:
    rank, tensor = divmod(rank, parallel.tensor)
    rank, sequence = divmod(rank, parallel.sequence)
    stage, data = divmod(rank, parallel.data)
    return Place(stage, data, sequence, tensor)


def has_output(here: Place, parallel: ParallelSection) -> bool:
    """True if a rank has the output layer. DualPipeV's first rank has the first and the last layers."""
    return here.stage == (0 if parallel.schedule == "dualpipev" else parallel.pipeline - 1)


def accumulation(train: TrainSection, parallel: ParallelSection) -> int:
    """Micro-batches of one optimizer step on each data-parallel worker."""
    return train.batch // (parallel.data * train.micro_batch)


def described(parallel: ParallelSection) -> str:
    """Number of workers and the dimensions over more than one of them, such as `6 workers: data 3 x pipeline 2`."""
    widths = {key: getattr(parallel, key) for key in ("data", "tensor", "pipeline", "sequence", "expert")}
    cut = " x ".join(f"{key} {size}" for key, size in widths.items() if size > 1)
    return f"{int(parallel.workers)} workers: {cut}" if cut else "1 worker"


def require_workable(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> None:
    """Raises if the layout cannot run; for a range of workers, if no number of it can."""
    train, parallel = largest(model, train, parallel)
    problem = recipe_problem(model, train, parallel)
    if problem is None:
        return
    nearest = min(workable_layouts(model, train, parallel), key=lambda other: distance(parallel, other), default=None)
    if nearest is None:
        raise UserError(problem, "Change parallel.workers, train.batch or the model's sizes: no layout of these works.")
    changes = [f"parallel.{key}={value}" for key, value in nearest.model_dump().items() if getattr(parallel, key) != value]
    raise UserError(problem, f"The nearest layout that works: {' '.join(changes)}")


def workable_layouts(model: ModelSection, train: TrainSection, like: ParallelSection) -> Iterator[ParallelSection]:
    """Every layout of as many workers that can run."""
    sizes = [size for size in range(1, like.workers + 1) if like.workers % size == 0]
    for tensor, pipeline, sequence, expert in product(sizes, repeat=4):
        for zero, schedule, offload in product(range(4), get_args(Schedule), OFFLOADS):
            change: dict[str, int | str] = {"tensor": tensor, "pipeline": pipeline, "sequence": sequence, "expert": expert}
            change |= {"zero": zero, "schedule": schedule, "offload": offload}
            try:
                candidate = ParallelSection(**(like.model_dump() | change))
            except ValidationError:
                continue
            if train.batch % (candidate.data * train.micro_batch) == 0 and recipe_problem(model, train, candidate) is None:
                yield candidate


def distance(one: ParallelSection, other: ParallelSection) -> float:
    """Distance between two layouts. A changed ZeRO stage is nearer than a halved dimension; where two dimensions exclude each
    other, the dimension that saves less memory is reduced first."""
    widths = {"tensor": 10, "pipeline": 11, "sequence": 9, "expert": 8}
    cut = sum(weight * abs(log2(getattr(one, key) / getattr(other, key))) for key, weight in widths.items())
    offload = abs(OFFLOADS.index(one.offload) - OFFLOADS.index(other.offload))
    return cut + abs(one.zero - other.zero) + 1.5 * offload + 5 * (one.schedule != other.schedule)
