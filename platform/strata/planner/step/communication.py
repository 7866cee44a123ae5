"""Collectives of a training step: bytes, placement and time.

Ranks are numbered as in Megatron: tensor-parallel ranks are neighbours, then the ranks of one sequence, then data-parallel ranks
(expert-parallel first), then pipeline stages. So tensor parallelism stays inside an NVLink domain as long as it fits, and a
pipeline leaves it.
"""

from dataclasses import dataclass
from math import ceil

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.collectives.cost import Links, cost
from strata.planner.collectives.patterns import Kind, Place
from strata.planner.layout import Layout


@dataclass(frozen=True)
class Exchange:
    """A collective of a step. `times` is the number of calls per GPU, `seconds` the time of one call."""

    dimension: str
    kind: Kind
    size: float  # bytes of a rank's whole buffer
    times: float
    place: Place
    seconds: float
    sent: float  # bytes that the busiest rank sends per call
    algorithm: str


@dataclass(frozen=True)
class Ground:
    """Topology of the cluster: NVLink domain size, number of GPUs, link rates."""

    domain: int
    gpus: int
    links: Links

    def place(self, ranks: int, stride: int) -> Place:
        """Placement of a group whose ranks are `stride` GPUs apart."""
        inside = max(1, min(ranks, self.domain // stride))
        domains = ceil(ranks / inside)
        return Place(inside, domains, shared=max(1, min(self.domain, self.gpus) // inside) if domains > 1 else 1)

    def exchange(self, dimension: str, kind: Kind, size: float, times: float, ranks: int, stride: int) -> Exchange:
        place = self.place(ranks, stride)
        if kind == "send":
            apart = stride // self.domain + 1
            place = Place(1, apart, shared=min(self.domain, self.gpus) if apart > 1 else 1)
        found = cost(kind, size, place, self.links)
        sent = found.wire_bytes_inside + found.wire_bytes_outside
        return Exchange(dimension, kind, size, times, place, found.seconds, sent, found.algorithm)


def tensor_exchanges(shape: Shape, layout: Layout, tokens: float, width: int, ground: Ground) -> list[Exchange]:
    """Tensor-parallel collectives of one layer's forward pass; its backward pass has the same number.

    A column-parallel matrix needs no communication before it, a row-parallel matrix an all-reduce after it. Megatron's sequence
    parallelism replaces the all-reduce by a reduce-scatter and an all-gather.
    """
    if layout.tensor == 1:
        return []
    size = tokens * shape.hidden * width
    if layout.sequence_parallel:
        return [
            ground.exchange("tensor", "all_gather", size, 2, layout.tensor, 1),
            ground.exchange("tensor", "reduce_scatter", size, 2, layout.tensor, 1),
        ]
    return [ground.exchange("tensor", "all_reduce", size, 2, layout.tensor, 1)]


def sequence_exchanges(shape: Shape, layout: Layout, tokens: float, width: int, ground: Ground) -> list[Exchange]:
    """Sequence-parallel collectives of one layer's forward pass.

    Ulysses exchanges tokens for heads before attention and back after it. A context ring sends keys and values on while it
    attends to those it has.
    """
    found = []
    heads = shape.heads + 2 * shape.kv_heads if not shape.latent else 3 * shape.heads
    dim = shape.head_dim
    if layout.sequence > 1:
        queries = tokens * shape.heads * dim * width / layout.tensor
        everything = tokens * heads * dim * width / layout.tensor
        found.append(ground.exchange("sequence", "all_to_all", everything, 1, layout.sequence, layout.tensor))
        found.append(ground.exchange("sequence", "all_to_all", queries, 1, layout.sequence, layout.tensor))
    if layout.context > 1:
        keys = tokens * 2 * shape.kv_heads * dim * width / min(layout.tensor, shape.kv_heads)
        stride = layout.tensor * layout.sequence
        found.append(ground.exchange("context", "send", keys, layout.context - 1, layout.context, stride))
    return found


def expert_exchanges(shape: Shape, layout: Layout, tokens: float, width: int, ground: Ground) -> list[Exchange]:
    """Dispatch and combine of one sparse layer's forward pass. Tensor-parallel ranks have copies of a token; each sends part."""
    if layout.expert == 1 or not shape.experts:
        return []
    size = tokens * shape.experts.top_k * shape.hidden * width / layout.tensor
    stride = layout.tensor * layout.sequence * layout.context
    return [ground.exchange("expert", "all_to_all", size, 2, layout.expert, stride)]


def pipeline_exchange(shape: Shape, layout: Layout, tokens: float, width: int, ground: Ground) -> Exchange | None:
    """Send between adjacent stages, in either direction. Tensor-parallel ranks have the same activations; each sends a share."""
    if layout.pipeline == 1:
        return None
    size = tokens * shape.hidden * width / layout.tensor
    stride = layout.gpus // layout.pipeline
    return ground.exchange("pipeline", "send", size, 1, 2, stride)


@dataclass(frozen=True)
class Reduction:
    """Data-parallel collectives.

    `reduce` runs once per step beside the last backward pass, `gather` beside the first forward pass. The others run for every
    micro-batch with ZeRO-3, and for the gradients with ZeRO-2.
    """

    reduce: tuple[Exchange, ...]
    gather: tuple[Exchange, ...]
    every_forward: tuple[Exchange, ...]
    every_backward: tuple[Exchange, ...]


def data_exchanges(dense: float, experts: float, layout: Layout, width: int, software: Software, ground: Ground) -> Reduction:
    """Data-parallel collectives for a GPU's `dense` and `experts` parameters; experts have fewer data-parallel ranks."""
    peers = layout.data * layout.sequence * layout.context
    groups = [(dense, peers, layout.tensor), (experts, peers // layout.expert, layout.tensor * layout.expert)]
    reduce, gather, every_forward, every_backward = [], [], [], []
    for parameters, ranks, stride in groups:
        if parameters == 0 or ranks == 1:
            continue
        gradients, weights = parameters * software.gradient_bytes, parameters * width
        if layout.zero == 0:
            reduce.append(ground.exchange("data", "all_reduce", gradients, 1, ranks, stride))
            continue
        scatter = ground.exchange("data", "reduce_scatter", gradients, 1, ranks, stride)
        collect = ground.exchange("data", "all_gather", weights, 1, ranks, stride)
        if layout.zero == 1:
            reduce.append(scatter)
            gather.append(collect)
        elif layout.zero == 2:
            every_backward.append(scatter)
            gather.append(collect)
        else:
            every_forward.append(collect)
            every_backward += [collect, scatter]
    return Reduction(tuple(reduce), tuple(gather), tuple(every_forward), tuple(every_backward))


def total(exchanges: list[Exchange] | tuple[Exchange, ...]) -> float:
    return sum(each.seconds * each.times for each in exchanges)
