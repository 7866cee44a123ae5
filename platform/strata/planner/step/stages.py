"""Partition of a model into pipeline stages, and the work of each part for one micro-batch.

A part is a contiguous run of layers on a stage: all of its layers, or one of its chunks where a schedule has several.
"""

from dataclasses import dataclass, replace

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.layout import Layout
from strata.planner.pipeline.schedules import parts_of as parts_of_stage
from strata.planner.step import communication as talk
from strata.planner.step.communication import Exchange, Ground
from strata.planner.step.compute import STREAMED, Cut, LayerTime, attention, feed_forward, head, mixture, rates
from strata.planner.worksheet import Worksheet
from strata.platform.hardware.specs import Gpu

# Communication beside a product takes some of its multiprocessors and of the memory's bandwidth, and its first and last chunk
# have nothing to hide behind: the share of a tensor-parallel exchange that is seen, where a program overlaps it. An estimate,
# settled with Megatron-Core's table in view.
TENSOR_EXPOSED = 0.25
# Communication beside compute slows it: DeepSeek-V3 gives it 20 of an H800's 132 multiprocessors (arXiv 2412.19437), NCCL takes
# 16 to 32 of an A100's 108.
HIDDEN_COST = 0.15


@dataclass(frozen=True)
class Layers:
    """Seconds of each kind of layer for one micro-batch, and of what comes after them."""

    dense: LayerTime
    sparse: LayerTime
    head: LayerTime


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds by which exchanges with other GPUs lengthen one pass."""

    tensor: float = 0.0
    sequence: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        return self.tensor + self.sequence + self.expert

    def times(self, factor: float) -> "ExchangeTime":
        return ExchangeTime(self.tensor * factor, self.sequence * factor, self.expert * factor)


@dataclass(frozen=True)
class Work:
    """Seconds of one part of the model for one micro-batch. `passes`: two, and one more where layers are recomputed whole.
    `gathered` is what the forward and the backward pass wait for parameters that peers hold (ZeRO-3)."""

    compute: LayerTime
    again: float
    exchange: ExchangeTime
    passes: int
    gathered: tuple[float, float] = (0.0, 0.0)

    @property
    def forward(self) -> float:
        return self.compute.forward + self.exchange.total + self.gathered[0]

    @property
    def backward(self) -> float:
        """Gradient of the input."""
        return self.compute.backward + self.again + self.exchange.total * (self.passes - 1) + self.gathered[1]

    @property
    def weight(self) -> float:
        return self.compute.weight


@dataclass(frozen=True)
class Exchanges:
    """Exchanges of a GPU for each layer in one pass, with the next stage, and with its data-parallel peers."""

    tensor: list[Exchange]
    sequence: list[Exchange]
    expert: list[Exchange]
    send: Exchange | None
    reduction: talk.Reduction


def cut_of(layout: Layout, sequence: int) -> Cut:
    return Cut(
        tokens=layout.micro_batch * sequence / (layout.sequence * layout.context),
        sequence=sequence,
        tensor=layout.tensor,
        split=layout.tensor if layout.sequence_parallel else 1,
        expert=layout.expert,
        precision=layout.precision,
    )


def layer_times(shape: Shape, gpu: Gpu, software: Software, cut: Cut, worksheet: Worksheet) -> Layers:
    rates(gpu, cut.precision, worksheet)
    around = attention(shape, cut, software, worksheet.part("attention"))
    dense = feed_forward(shape, cut, software, worksheet.part("feed-forward")) if shape.dense_layers else LayerTime()
    sparse = mixture(shape, cut, software, worksheet.part("mixture of experts")) if shape.experts else LayerTime()
    return Layers(around + dense, around + sparse, head(shape, cut, software, worksheet.part("head")))


def parts_of(layout: Layout) -> int:
    """Parts that the layers are divided into. V-shaped schedules have two per stage."""
    return layout.pipeline * (2 if layout.schedule in ("zbv", "dualpipev") else layout.interleave)


def layers_of(shape: Shape, parts: int) -> list[tuple[int, int]]:
    """Dense and sparse layers of each part. What does not divide goes to the parts in the middle, which have neither the
    embedding nor the head."""
    each, over = divmod(shape.layers, parts)
    first = (parts - over) // 2
    found, start = [], 0
    for part in range(parts):
        count = each + (first <= part < first + over)
        dense = min(max(shape.dense_layers - start, 0), count)
        found.append((dense, count - dense))
        start += count
    return found


def stage_parameters(shape: Shape, layout: Layout, counts: list[tuple[int, int]]) -> tuple[float, float]:
    """Parameters of a GPU of the largest stage: those that all tokens pass through, and experts."""
    largest = (0.0, 0.0)
    for stage in range(layout.pipeline):
        parts = parts_of_stage(layout.schedule, layout.pipeline, len(counts) // layout.pipeline, stage)
        dense, sparse = (sum(counts[part][kind] for part in parts) for kind in (0, 1))
        own = shape.layers_parameters(dense, sparse)
        own += shape.embedding_parameters() * (0 in parts) + shape.head_parameters() * (len(counts) - 1 in parts)
        largest = max(largest, (own / layout.tensor, shape.routed_parameters(sparse) / layout.tensor / layout.expert), key=sum)
    return largest


def exchanges_of(
    shape: Shape, layout: Layout, tokens: float, own: tuple[float, float], software: Software, ground: Ground
) -> Exchanges:
    width = 4 if layout.precision == "fp32" else 2
    return Exchanges(
        tensor=talk.tensor_exchanges(shape, layout, tokens, width, ground),
        sequence=talk.sequence_exchanges(shape, layout, tokens, width, ground),
        expert=talk.expert_exchanges(shape, layout, tokens, width, ground),
        send=talk.pipeline_exchange(shape, layout, tokens, width, ground),
        reduction=talk.data_exchanges(*own, layout, width, software, ground),
    )


def works_of(
    layers: Layers, counts: list[tuple[int, int]], layout: Layout, software: Software, gpu: Gpu, exchanges: Exchanges, own: float
) -> list[Work]:
    """Work of every part, from the model's input to its output. `own` is how many parameters a GPU has."""
    tensor = talk.total(exchanges.tensor) * (TENSOR_EXPOSED if software.overlaps_tensor else 1.0)
    sequence = _sequence_seen(exchanges.sequence, layers)
    chunks = len(counts) // layout.pipeline
    # A micro-batch's gradients are added to those before it, which are read and written.
    added = LayerTime(weight=2 * software.gradient_bytes * own / chunks / (gpu.bandwidth * STREAMED))
    found = []
    for part, (dense, sparse) in enumerate(counts):
        own_layers = layers.dense.times(dense) + layers.sparse.times(sparse)
        compute = own_layers + (layers.head if part == len(counts) - 1 else LayerTime())
        depth = dense + sparse
        again = own_layers.forward if layout.recompute == "full" else 0.0
        if layout.recompute == "selective":
            again = _selected(own_layers, software)
        work = Work(
            compute=compute + added,
            again=again,
            exchange=ExchangeTime(depth * tensor, depth * sequence, sparse * talk.total(exchanges.expert)),
            passes=3 if layout.recompute == "full" else 2,
        )
        found.append(replace(work, gathered=_gathered(work, exchanges.reduction, chunks, software)))
    return found


def seen_beside(talk_s: float, compute_s: float) -> float:
    """Seconds that concurrent communication adds to compute."""
    return max(0.0, talk_s - compute_s) + HIDDEN_COST * min(talk_s, compute_s)


def _selected(compute: LayerTime, software: Software) -> float:
    match software.selective:
        case "core":
            return compute.core
        case "streams":
            return compute.stream
        case "half":
            return compute.stream + compute.products / 2


def _sequence_seen(among: list[Exchange], layers: Layers) -> float:
    """Exposed seconds of sequence parallelism. A context ring attends to one part during the transfer of the next."""
    ulysses = talk.total([each for each in among if each.dimension == "sequence"])
    ring = talk.total([each for each in among if each.dimension == "context"])
    return ulysses + max(0.0, ring - layers.dense.core)


def _gathered(work: Work, reduction: talk.Reduction, chunks: int, software: Software) -> tuple[float, float]:
    """Exposed seconds of ZeRO-3, which gathers parameters one layer ahead in each pass."""
    forward, backward = (talk.total(each) / chunks for each in (reduction.every_forward, reduction.every_backward))
    if not software.overlaps_data:
        return forward, backward
    return seen_beside(forward, work.forward), seen_beside(backward, work.backward + work.weight)
