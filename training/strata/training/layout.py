"""Which layouts work, and where a rank stands in one. Nothing here needs torch: a recipe is refused before a worker starts."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import log2

from pydantic import ValidationError

from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection, ParallelSection, TrainSection

OFFLOADS = ("none", "optimizer", "all")


@dataclass(frozen=True)
class Place:
    """A rank's coordinates. Tensor-parallel peers are neighbours: theirs is the traffic that wants the fastest links."""

    stage: int
    data: int
    sequence: int
    tensor: int


def place(rank: int, parallel: ParallelSection) -> Place:
    rank, tensor = divmod(rank, parallel.tensor)
    rank, sequence = divmod(rank, parallel.sequence)
    stage, data = divmod(rank, parallel.data)
    return Place(stage, data, sequence, tensor)


def accumulation(train: TrainSection, parallel: ParallelSection) -> int:
    """Micro-batches that one optimizer step is made of, on each data-parallel worker."""
    return train.batch // (parallel.data * train.micro_batch)


def require_workable(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> None:
    problem = obstacle(model, train, parallel)
    if problem is None:
        return
    nearest = min(workable(model, train, parallel), key=lambda other: distance(parallel, other), default=None)
    if nearest is None:
        raise UserError(problem, "Change parallel.workers, train.batch or the model's sizes: no layout of these works.")
    changes = [f"parallel.{key}={value}" for key, value in nearest.model_dump().items() if getattr(parallel, key) != value]
    raise UserError(problem, f"The nearest layout that works: {' '.join(changes)}")


def obstacle(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> str | None:
    """Why DeepSpeed, or the model's shape, does not allow this layout; None if nothing stands in its way."""
    p = parallel
    micro_batches = accumulation(train, p)
    if p.pipeline > 1:
        parts = p.pipeline * (2 if p.schedule == "dualpipev" else 1)
        if p.zero > 1:
            return f"A pipeline (parallel.pipeline={p.pipeline}) works with ZeRO 0 and 1, not with parallel.zero={p.zero}."
        if p.sequence > 1 or p.expert > 1:
            return "DeepSpeed's pipeline knows neither sequence nor expert parallelism."
        if p.offload != "none":
            return f"A pipeline does not offload (parallel.offload={p.offload})."
        if model.layers < parts:
            return f"model.layers={model.layers} cannot be cut into the {parts} parts of this pipeline."
        if p.schedule == "dualpipev" and micro_batches < 2 * p.pipeline:
            return (
                f"DualPipeV needs {2 * p.pipeline} micro-batches a step; train.batch={train.batch} makes {micro_batches} "
                f"(data-parallel workers {p.data} x train.micro_batch={train.micro_batch})."
            )
    elif p.schedule == "dualpipev":
        return "parallel.schedule=dualpipev orders a pipeline's micro-batches, and parallel.pipeline is 1."
    if p.offload != "none" and p.zero == 0:
        return f"parallel.offload={p.offload} offloads what ZeRO shares out, and parallel.zero is 0."
    if p.offload == "all" and p.zero < 3:
        return f"parallel.offload=all offloads parameters, which only parallel.zero=3 shares out (it is {p.zero})."
    for key in ("tensor", "sequence"):
        size = getattr(p, key)
        if model.heads % size or model.kv_heads % size:
            return f"parallel.{key}={size} must divide model.heads={model.heads} and model.kv_heads={model.kv_heads}."
    if model.ffn % p.tensor or (model.moe and model.moe.shared_ffn % p.tensor):
        return f"parallel.tensor={p.tensor} must divide the feed-forward width (model.ffn={model.ffn})."
    if model.context % p.sequence:
        return f"parallel.sequence={p.sequence} must divide model.context={model.context}."
    if train.precision == "bf16" and p.zero == 0 and (p.tensor > 1 or p.expert > 1):
        return "In bf16 without ZeRO, DeepSpeed clips each worker's part of the model by a norm of its own."
    if p.sequence > 1 and p.tensor > 1:
        return "DeepSpeed does not combine tensor and sequence parallelism."
    if p.sequence > 1 and model.moe:
        return "A mixture of experts balances whole sequences, which parallel.sequence would cut."
    return _expert_obstacle(model, p)


def _expert_obstacle(model: ModelSection, p: ParallelSection) -> str | None:
    if p.expert == 1:
        return None
    if model.moe is None:
        return f"parallel.expert={p.expert} shares out experts, and the model has none (model.moe)."
    if model.moe.experts % p.expert:
        return f"parallel.expert={p.expert} must divide model.moe.experts={model.moe.experts}."
    if p.tensor > 1 or p.sequence > 1:
        return "Expert parallelism is combined with data parallelism only."
    if p.offload != "none":
        return f"Expert parallelism does not offload (parallel.offload={p.offload})."
    return None


def workable(model: ModelSection, train: TrainSection, like: ParallelSection) -> Iterator[ParallelSection]:
    """Every layout of as many workers that nothing stands in the way of."""
    sizes = [size for size in range(1, like.workers + 1) if like.workers % size == 0]
    for tensor, pipeline, sequence, expert in product(sizes, repeat=4):
        for zero, schedule, offload in product(range(4), ("1f1b", "dualpipev"), OFFLOADS):
            change: dict[str, int | str] = {"tensor": tensor, "pipeline": pipeline, "sequence": sequence, "expert": expert}
            change |= {"zero": zero, "schedule": schedule, "offload": offload}
            try:
                candidate = ParallelSection(**(like.model_dump() | change))
            except ValidationError:
                continue
            if train.batch % (candidate.data * train.micro_batch) == 0 and obstacle(model, train, candidate) is None:
                yield candidate


def distance(one: ParallelSection, other: ParallelSection) -> float:
    """A changed ZeRO stage is nearer than a dimension made half as wide, and of two dimensions in each other's way the one
    that saves less memory is the nearer to give up."""
    widths = {"tensor": 10, "pipeline": 11, "sequence": 9, "expert": 8}
    cut = sum(weight * abs(log2(getattr(one, key) / getattr(other, key))) for key, weight in widths.items())
    offload = abs(OFFLOADS.index(one.offload) - OFFLOADS.index(other.offload))
    return cut + abs(one.zero - other.zero) + 1.5 * offload + 5 * (one.schedule != other.schedule)
