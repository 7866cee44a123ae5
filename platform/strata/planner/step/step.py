"""Time of a training step: the work of each part of the model along the schedule, and work once per step.

step = pipeline + exposed data parallelism + optimizer
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.collectives.cost import links
from strata.planner.layout import Layout
from strata.planner.pipeline.simulate import Times, quick_total
from strata.planner.step import communication as talk
from strata.planner.step.communication import Exchange, Ground
from strata.planner.step.compute import STREAMED, Cut
from strata.planner.step.flops import attention_flops, forward_flops
from strata.planner.step.stages import (
    HIDDEN_COST,
    Exchanges,
    Layers,
    Work,
    cut_of,
    exchanges_of,
    layer_times,
    layers_of,
    parts_of,
    stage_parameters,
    works_of,
)
from strata.planner.worksheet import Worksheet
from strata.platform.hardware.specs import Fabric, Gpu

# Of what data-parallel peers say beside the backward pass, the last bucket is seen: Megatron-Core has about as many buckets.
BUCKETS = 16
# Bytes that AdamW moves for a parameter in mixed precision, besides the gradient: fp32 weight and two moments read and written,
# the weight in 16 bits written. The gradient is read twice, once for the norm.
ADAM_BYTES = 3 * 4 * 2 + 2
HOST_RATE = 40e9  # of memory for one GPU's part of the host: two sockets of about 300 GB/s for eight GPUs, at half their rate


@dataclass(frozen=True)
class Step:
    """Time of a step. `spent` is the breakdown by name, with sum `seconds`. `exchanges` are those of the whole step."""

    seconds: float
    spent: dict[str, float]
    times: Times
    exchanges: tuple[Exchange, ...]
    model_flops: float  # of the whole step, over all GPUs
    hardware_flops: float
    mfu: float
    hfu: float
    tokens_per_s: float

    @property
    def limit(self) -> str:
        """The component with the most time."""
        return max(self.spent, key=lambda name: self.spent[name])


def plan_step(
    shape: Shape,
    layout: Layout,
    gpu: Gpu,
    fabric: Fabric,
    software: Software,
    worksheet: Worksheet,
    sequence: int | None = None,
    layers: Callable[[Cut], Layers] | None = None,
) -> Step:
    """Plan a step. `layers` has known layer times; without it they are computed on the worksheet."""
    sequence = shape.context if sequence is None else sequence
    cut = cut_of(layout, sequence)
    found = layers(cut) if layers else layer_times(shape, gpu, software, cut, worksheet.part("one layer, one micro-batch"))
    ground = Ground(gpu.domain, layout.gpus, links(gpu, fabric, launch=0.0))
    counts = layers_of(shape, parts_of(layout))
    own = stage_parameters(shape, layout, counts)
    exchanges = exchanges_of(shape, layout, cut.tokens, own, software, ground)
    works = works_of(found, counts, layout, software, gpu, exchanges, sum(own))
    times = _times(works, layout, exchanges.send)
    pipeline = _pipeline(times, layout)

    once = worksheet.part("once a step")
    data_s = _data_seen(exchanges.reduction, works, layout, software, once)
    optimizer_s = _optimizer(own, layout, gpu, software, once)
    tied_s = _tied(shape, layout, software, ground)
    spent = _spent(works, layout)
    spent["pipeline bubble"] = pipeline - sum(spent.values())
    spent |= {"data parallelism": data_s, "optimizer": optimizer_s, "tied embedding": tied_s}

    result = worksheet.part("the step")
    why = f"{layout.micro_batches} micro-batches through {layout.pipeline} stages, {layout.schedule}, simulated"
    result.given("pipeline", pipeline, "s", why)
    result.given("data_exposed", data_s, "s", "data-parallel exchange that nothing covers")
    result.given("optimizer", optimizer_s, "s")
    result.given("tied_embedding", tied_s, "s", "first and last stage add up its gradients")
    result.work_out("step", "pipeline + data_exposed + optimizer + tied_embedding", "s")
    result.given("batch_tokens", layout.batch * sequence, "", "tokens of a step")
    result.given("forward_flops", forward_flops(shape, sequence), "FLOP", "of one token")
    result.given("recomputed", _recomputed(shape, layout, sequence), "FLOP", "of one token, done again")
    result.given("gpus", layout.gpus)
    result.given("peak", gpu.flops[layout.precision], "FLOP/s")
    result.work_out("model_flops", "3 * forward_flops * batch_tokens", "FLOP")
    result.work_out("hardware_flops", "model_flops + recomputed * batch_tokens", "FLOP")
    result.work_out("mfu", "model_flops / (step * gpus * peak)")
    result.work_out("hfu", "hardware_flops / (step * gpus * peak)")
    result.work_out("tokens_per_s", "batch_tokens / step", "/s")
    return Step(
        seconds=result["step"],
        spent=spent,
        times=times,
        exchanges=_over_the_step(exchanges, layout, counts),
        model_flops=result["model_flops"],
        hardware_flops=result["hardware_flops"],
        mfu=result["mfu"],
        hfu=result["hfu"],
        tokens_per_s=result["tokens_per_s"],
    )


def _covers(layout: Layout) -> bool:
    """True if communication of one micro-batch overlaps with compute of another."""
    return layout.schedule in ("dualpipe", "dualpipev")


def _times(works: list[Work], layout: Layout, send: Exchange | None) -> Times:
    return Times(
        forward=tuple(work.forward for work in works),
        backward=tuple(work.backward for work in works),
        weight=tuple(work.weight for work in works),
        transfer=(send.seconds if send else 0.0,) * (len(works) - 1),
        hidden=tuple(work.exchange.total * (1 - HIDDEN_COST) for work in works) if _covers(layout) else (),
    )


def _pipeline(times: Times, layout: Layout) -> float:
    if len(times.forward) == 1:
        return layout.micro_batches * (times.forward[0] + times.backward[0] + times.weight[0])
    return quick_total(layout.schedule, layout.pipeline, layout.micro_batches, layout.interleave, times)


def _data_seen(reduction: talk.Reduction, works: list[Work], layout: Layout, software: Software, worksheet: Worksheet) -> float:
    """Exposed seconds of data-parallel communication once per step, beside the last micro-batch's backward pass and the next
    step's first forward pass."""
    worksheet.given("reduce", talk.total(reduction.reduce), "s", "gradients of data-parallel peers")
    worksheet.given("gather", talk.total(reduction.gather), "s", "parameters of data-parallel peers")
    if not software.overlaps_data:
        return worksheet.work_out("data_exposed", "reduce + gather", "s", "nothing goes on beside it")
    work, chunks = works[len(works) // 2], len(works) // layout.pipeline
    worksheet.given("last_backward", (work.backward + work.weight) * chunks, "s", "one micro-batch's")
    worksheet.given("first_forward", work.forward * chunks, "s", "one micro-batch's")
    worksheet.given("buckets", BUCKETS, "", "the last has nothing to hide behind")
    worksheet.given("hidden_cost", HIDDEN_COST, "", "by which compute is slowed down beside it")
    return worksheet.work_out(
        "data_exposed",
        "max(reduce / buckets, reduce - last_backward) + max(gather / buckets, gather - first_forward)"
        " + hidden_cost * (min(reduce, last_backward) + min(gather, first_forward))",
        "s",
    )


def _optimizer(own: tuple[float, float], layout: Layout, gpu: Gpu, software: Software, worksheet: Worksheet) -> float:
    dense, experts = own
    peers = layout.data * layout.sequence * layout.context if layout.zero else 1
    worksheet.given("updated", dense / peers + experts / max(1.0, peers / layout.expert), "", "parameters that this GPU updates")
    worksheet.given("adam", ADAM_BYTES + 2 * software.gradient_bytes, "B", "moved for each")
    if layout.offload == "none":
        worksheet.given("memory_rate", gpu.bandwidth * STREAMED, "B/s")
        return worksheet.work_out("optimizer", "updated * adam / memory_rate", "s")
    worksheet.given("host_rate", HOST_RATE, "B/s", "of the host's memory, for one GPU's part of it")
    worksheet.given("pcie", gpu.pcie, "B/s")
    why = "on the host; gradients go down in fp32 and weights up in 16 bits"
    return worksheet.work_out("optimizer", "updated * (adam / host_rate + 6 / pcie)", "s", why)


def _tied(shape: Shape, layout: Layout, software: Software, ground: Ground) -> float:
    """Seconds for a tied embedding: where embedding and head are one matrix, first and last stage both have a gradient of it."""
    if not shape.tied or layout.pipeline == 1 or layout.schedule in ("zbv", "dualpipev"):
        return 0.0
    size = shape.table_parameters() / layout.tensor * software.gradient_bytes
    return ground.exchange("embedding", "all_reduce", size, 1, 2, layout.gpus // layout.pipeline).seconds


def _spent(works: list[Work], layout: Layout) -> dict[str, float]:
    """Seconds of the mean GPU, in all micro-batches of a step."""
    share = layout.micro_batches / layout.pipeline
    seen = HIDDEN_COST if _covers(layout) else 1.0
    return {
        "matrix products": sum(2 * work.compute.products + work.compute.weight for work in works) * share,
        "attention": sum(work.compute.core + work.compute.core_backward for work in works) * share,
        "memory-bound kernels": sum(work.compute.stream + work.compute.stream_backward for work in works) * share,
        "recompute": sum(work.again for work in works) * share,
        "tensor parallelism": sum(work.exchange.tensor * work.passes for work in works) * share * seen,
        "sequence parallelism": sum(work.exchange.sequence * work.passes for work in works) * share * seen,
        "expert parallelism": sum(work.exchange.expert * work.passes for work in works) * share * seen,
        "parameters gathered": sum(sum(work.gathered) for work in works) * share,
    }


def _recomputed(shape: Shape, layout: Layout, sequence: int) -> float:
    """Recomputed FLOP per token."""
    if layout.recompute == "full":
        return forward_flops(shape, sequence) - 2 * shape.table_parameters()
    return attention_flops(shape, sequence) * shape.layers if layout.recompute == "selective" else 0.0


def _over_the_step(exchanges: Exchanges, layout: Layout, counts: list[tuple[int, int]]) -> tuple[Exchange, ...]:
    """Exchanges with `times` counted over a step, for a GPU of the stage with the most layers, and the most with experts."""
    m = layout.micro_batches
    passes = 3 if layout.recompute == "full" else 2
    stages = [counts[stage :: layout.pipeline] for stage in range(layout.pipeline)]
    layers = max(sum(sum(part) for part in own) for own in stages)
    sparse = max(sum(part[1] for part in own) for own in stages)
    found = [replace(each, times=each.times * passes * layers * m) for each in (*exchanges.tensor, *exchanges.sequence)]
    found += [replace(each, times=each.times * passes * sparse * m) for each in exchanges.expert]
    if exchanges.send:
        found.append(replace(exchanges.send, times=2 * m * len(stages[0])))
    reduction = exchanges.reduction
    found += [*reduction.reduce, *reduction.gather]
    return (*found, *(replace(each, times=m) for each in (*reduction.every_forward, *reduction.every_backward)))
