"""Memory model against published formulas, torch's saved tensors, and published runs."""

import gc
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest

from strata.planner.catalogue import library
from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import PROGRAMS
from strata.planner.layout import Layout, Recompute, Schedule
from strata.planner.memory import plan as memory
from strata.planner.memory.activations import EAGER, FSDP, OWN, UNFUSED, Keeping, keeping_of, layer_parts
from strata.planner.memory.plan import MemoryPlan, peak_bytes, plan_memory
from strata.planner.pipeline import schedules
from strata.planner.validation import check_memory
from strata.planner.worksheet import Worksheet
from strata.platform.recipe import ModelSection, MoESection

Kernels = Literal["strata", "torch"]
FLASH = Keeping("flash", "megatron")
OWN_ON_CPU = replace(OWN, cpu=True)
GIB = 2**30
H100 = 80e9
MODELS = ("gpt-3-175b", "llama-3.1-8b", "mixtral-8x7b", "deepseek-v3")
KEEPINGS = (UNFUSED, FLASH, FSDP, EAGER, OWN, OWN_ON_CPU)
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
GPT = Shape("gpt", 4, 256, 8, 8, 32, 1024, 1000, 128, gated=False, biases=True, positions=True)


def plan(shape: Shape, layout: Layout, keeping: Keeping = FLASH, sequence: int | None = None) -> MemoryPlan:
    return plan_memory(shape, layout, H100, keeping, Worksheet("memory"), sequence)


def layouts(shape: Shape, count: int, seed: int = 0) -> Iterator[Layout]:
    """Random layouts that a schedule and a model allow."""
    draw = random.Random(seed)
    found = 0
    while found < count:
        schedule: Schedule = draw.choice(list(schedules.IN_FLIGHT))
        pipeline = draw.choice((1, 2, 4, 8))
        interleave = draw.choice((2, 3)) if schedule == "interleaved" else 2 if schedule in ("zbv", "dualpipev") else 1
        micro_batches, micro_batch = pipeline * draw.choice((2, 3, 8)), draw.choice((1, 2))
        data, sequence, context = draw.choice((1, 2, 16)), draw.choice((1, 2)), draw.choice((1, 4))
        tensor = draw.choice((1, 2, 8))
        expert = draw.choice([n for n in (1, 2, 8) if data * sequence * context % n == 0]) if shape.experts else 1
        if pipeline > 1 and schedules.refusal(schedule, pipeline, micro_batches, interleave):
            continue
        found += 1
        yield Layout(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            sequence=sequence,
            context=context,
            expert=expert,
            schedule=schedule if pipeline > 1 else "1f1b",
            interleave=interleave if pipeline > 1 else 1,
            zero=draw.choice((0, 1, 2, 3)),
            micro_batch=micro_batch,
            batch=data * micro_batch * micro_batches,
            recompute=draw.choice(RECOMPUTES),
            offload=draw.choice(("none", "optimizer", "all")),
            sequence_parallel=tensor > 1 and draw.random() < 0.5,
            precision=draw.choice(("fp32", "fp16", "bf16", "fp8")),
        )


@pytest.mark.parametrize("t", [1, 2, 4])
def test_unfused_layer_matches_korthikanti(t: int) -> None:
    """arXiv 2205.05198, equations 1, 2, 4 and table 2."""
    s, b, h, a = GPT.context, 3, GPT.hidden, GPT.heads
    cut = Layout(tensor=t, micro_batch=b, precision="fp16")
    sequence_parallel = replace(cut, sequence_parallel=True)
    selective = replace(sequence_parallel, recompute="selective")

    def of(layout: Layout) -> float:
        return layer_parts(GPT, layout, UNFUSED).total

    assert of(cut) == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert of(sequence_parallel) == pytest.approx(s * b * h / t * (34 + 5 * a * s / h))
    assert of(selective) == pytest.approx(s * b * h * 34 / t)
    assert of(replace(cut, recompute="full")) == pytest.approx(2 * s * b * h)


def test_layer_parts_match_korthikanti() -> None:
    """Section 4.1: attention 11 + 5as/h, MLP 19, norms 4."""
    parts = layer_parts(GPT, Layout(precision="fp16"), UNFUSED)
    unit = GPT.context * GPT.hidden
    masks = parts.residual / 2
    assert parts.projections + parts.core + masks == 11 * unit + 5 * GPT.heads * GPT.context**2
    assert parts.feed_forward + masks == 19 * unit
    assert parts.norms == 4 * unit


def test_flash_attention_saves_neither_scores_nor_masks() -> None:
    parts = layer_parts(GPT, Layout(), FLASH)
    assert parts.total == 32 * GPT.context * GPT.hidden + 4 * GPT.context * GPT.heads


def test_splitting_a_sequence_divides_activations() -> None:
    shape = library.model("llama-3.1-8b")
    whole, halves = Layout(), (Layout(sequence=2), Layout(context=2))
    for half in halves:
        assert layer_parts(shape, half, FLASH).total == layer_parts(shape, whole, FLASH).total / 2
    # Eight KV heads are replicated on 16 GPUs, so each GPU has twice the keys per query head.
    core = {sequence: layer_parts(shape, Layout(sequence=sequence), FLASH).core for sequence in (8, 16)}
    assert core[8] / 2 < core[16] < core[8]


def test_experts_get_top_k_copies() -> None:
    shape = library.model("mixtral-8x7b")
    assert shape.experts
    one = replace(shape, experts=replace(shape.experts, top_k=1))
    added = layer_parts(shape, Layout(), FLASH, sparse=True).total - layer_parts(one, Layout(), FLASH, sparse=True).total
    assert added == shape.context * (2 * shape.hidden + 6 * shape.experts.ffn)  # per additional expert: input; gate, up, product
    crowded = layer_parts(shape, Layout(data=8, expert=8), FLASH, sparse=True)
    assert crowded.feed_forward > layer_parts(shape, Layout(), FLASH, sparse=True).feed_forward


@pytest.fixture
def gpu_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strata's operators on a CPU too, where training would take torch's."""
    from strata.kernels import flash_attention, rms_norm, rope, swiglu
    from strata.training.model import ops

    def attention(q: Any, k: Any, v: Any, window: int | None, scale: float, bounds: Any, longest: int) -> Any:
        return flash_attention(q, k, v, window=window, scale=scale, cu_seqlens=bounds, max_seqlen=longest)

    on_gpus = replace(ops._strata(), rms_norm=rms_norm, rope=rope, swiglu=swiglu, attention=attention)
    monkeypatch.setattr(ops, "_strata", lambda: on_gpus)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.rotation)])  # bf16 is slow on a CPU
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize(
    ("moe", "tolerance"),
    # The routing indices of experts are not counted.
    [(None, 0.0), (MoESection(experts=4, top_k=2), 0.015), (MoESection(experts=4, top_k=2, shared_ffn=96), 0.015)],
)
@pytest.mark.parametrize("kernels", ["strata", "torch"])
def test_a_layer_equals_the_tensors_that_torch_saves(
    kernels: Kernels, precision: Any, recompute: Recompute, moe: MoESection | None, tolerance: float, gpu_ops: None
) -> None:
    saved = {layers: _saved_by_torch(_section(layers, moe), precision, recompute, kernels) for layers in (2, 4)}
    shape = library.from_recipe(_section(2, moe), "ours")
    layout = Layout(micro_batch=2, recompute=recompute, precision=precision)
    keeping = OWN if kernels == "strata" else EAGER
    planned = layer_parts(shape, layout, keeping, sparse=moe is not None).total
    assert planned == pytest.approx((saved[4] - saved[2]) / 2, rel=tolerance)


def _section(layers: int, moe: MoESection | None) -> ModelSection:
    return ModelSection(layers=layers, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=512, context=64, moe=moe)


def _saved_by_torch(section: ModelSection, precision: str, mode: Recompute, kernels: Kernels) -> int:
    """Bytes allocated after a forward pass while its loss is referenced."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from strata.training.model.llama import Llama
    from strata.training.parallel import recompute

    model = Llama(section, kernels=kernels).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    recompute.apply(model, mode)
    tokens_bt = torch.zeros(2, section.context, dtype=torch.long)
    model(tokens_bt, targets_bt=tokens_bt)  # the first pass allocates persistent buffers
    gc.collect()  # a recomputed pass frees its tensors only here
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = model(tokens_bt, targets_bt=tokens_bt)
    assert loss.requires_grad
    assert profiled.profiler and profiled.profiler.kineto_results
    return sum(event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]")


def test_zero_table() -> None:
    rows = check_memory.zero_table()
    assert len(rows) == 30
    assert check_memory.worst_error(rows) <= 0.01


def test_an_error_beyond_rounding_is_detected() -> None:
    row = check_memory.Row(7.5, 1024, 3, "0.12", predicted=0.13)
    assert row.error == pytest.approx(0.04)


def test_fp32_and_variants_of_state() -> None:
    shape, layout = library.model("llama-3.1-8b"), Layout(zero=0, batch=8, precision="fp32")
    stage = plan(shape, layout).stages[0]
    assert (stage.parameters, stage.gradients, stage.optimizer) == tuple(n * shape.parameters() for n in (4, 4, 8))
    in_fp32 = plan(shape, replace(layout, precision="bf16"), replace(FLASH, fp32_gradients=True)).stages[0]
    assert in_fp32.gradients == 4 * shape.parameters()
    # DeepSpeed's ZeRO copies parameters that are already in fp32.
    assert plan(shape, replace(layout, zero=1), EAGER).stages[0].optimizer == 12 * shape.parameters()


@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_the_model_once(name: str) -> None:
    shape = library.model(name)
    copies = shape.vocab * shape.hidden if shape.tied else 0  # the last stage has a copy for the head
    for schedule, interleave in (("1f1b", 1), ("interleaved", 2), ("zbv", 2)):
        layout = Layout(pipeline=4, schedule=schedule, interleave=interleave, zero=0, batch=8)  # type: ignore[arg-type]
        held = sum(stage.parameters for stage in plan(shape, layout).stages)
        assert held == 2 * (shape.parameters() + (copies if schedule != "zbv" else 0))
    layout = Layout(pipeline=4, schedule="dualpipe", zero=0, batch=8)
    assert sum(stage.parameters for stage in plan(shape, layout).stages) >= 2 * 2 * shape.parameters()


def test_experts_are_sharded_separately() -> None:
    shape = library.model("mixtral-8x7b")
    spread = plan(shape, Layout(data=16, expert=8, zero=0, batch=16)).stages[0]
    experts = shape.layers * 8 * shape.expert_parameters()
    assert spread.parameters == 2 * (shape.parameters() - experts + experts / 8)
    shared = plan(shape, Layout(data=16, expert=8, zero=3, batch=16)).stages[0]
    assert shared.parameters == pytest.approx(2 * shape.parameters() / 16)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keeping", KEEPINGS)
def test_the_fast_peak_equals_the_plan(name: str, keeping: Keeping) -> None:
    shape = library.model(name)
    for layout in layouts(shape, 60):
        planned = plan(shape, layout, keeping, 4096)
        assert peak_bytes(shape, layout, keeping, 4096) == pytest.approx(planned.peak, rel=1e-12), layout


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keeping", KEEPINGS)
def test_doubling_data_never_raises_state(name: str, keeping: Keeping) -> None:
    shape = library.model(name)
    for layout in layouts(shape, 40, seed=1):
        if layout.zero == 0 or layout.offload != "none":
            continue
        twice = replace(layout, data=2 * layout.data, batch=2 * layout.batch)
        before, after = (plan(shape, each, keeping, 4096).stages for each in (layout, twice))
        for one, two in zip(before, after, strict=True):
            state = [stage.parameters + stage.gradients + stage.optimizer for stage in (one, two)]
            assert state[1] < state[0], layout


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keeping", KEEPINGS)
def test_more_recompute_never_raises_the_peak(name: str, keeping: Keeping) -> None:
    shape = library.model(name)
    for layout in layouts(shape, 40, seed=2):
        peaks = [peak_bytes(shape, replace(layout, recompute=mode), keeping, 4096) for mode in RECOMPUTES]
        assert peaks == sorted(peaks, reverse=True), layout


@pytest.mark.parametrize("name", MODELS)
def test_more_stages_never_raise_the_peak(name: str) -> None:
    shape = library.model(name)
    largest = [
        max(stage.parameters for stage in plan(shape, Layout(pipeline=stages, batch=64)).stages) for stages in range(1, 17)
    ]
    assert largest == sorted(largest, reverse=True)


def test_the_first_stage_holds_most_activations() -> None:
    stages = plan(library.model("gpt-3-175b"), Layout(tensor=8, pipeline=8, batch=64)).stages
    assert [stage.stage for stage in stages] == list(range(8))
    held = [stage.activations / stage.layers for stage in stages]
    assert held[0] == pytest.approx(8 * held[-2] / 2, rel=0.01)  # eight micro-batches in flight versus two
    assert stages[-1].logits > 0 and stages[-2].logits == 0


def test_offload_moves_state_to_the_host() -> None:
    shape, layout = library.model("llama-3.1-8b"), Layout(data=8, zero=3, batch=8)
    none, optimizer, everything = (plan(shape, replace(layout, offload=what)).stages[0] for what in ("none", "optimizer", "all"))
    assert (none.host, optimizer.optimizer, optimizer.gradients, everything.parameters) == (0, 0, 0, 0)
    assert optimizer.host == none.optimizer + 4 * shape.parameters() / 8
    assert everything.host == optimizer.host + none.parameters
    assert none.total > optimizer.total > everything.total


def test_fit_and_fullest_stage() -> None:
    shape = library.model("llama-3.1-8b")
    small = plan(shape, Layout(data=8, zero=3, batch=8, recompute="full"), sequence=2048)
    assert small.fits
    large = plan(shape, Layout(data=8, zero=0, batch=8), sequence=2048)
    assert not large.fits
    assert large.where == "stage 0, optimizer"


def test_the_worksheet_explains_the_fullest_stage() -> None:
    worksheet = Worksheet("memory")
    found = plan_memory(library.model("deepseek-v3"), Layout(data=8, pipeline=8, batch=64), H100, FLASH, worksheet, 4096)
    part = next(part for part in worksheet.parts if part.title == f"stage {found.fullest.stage}")
    assert part["total"] == pytest.approx(found.peak)


def test_every_program_has_an_activation_model() -> None:
    assert {name: keeping_of(program).engine for name, program in PROGRAMS.items()} == {
        "megatron-2021": "megatron",
        "megatron-2022": "megatron",
        "megatron-core": "megatron",
        "torch-fsdp": "fsdp",
        "strata": "deepspeed",
        "strata-torch": "deepspeed",
        "strata-eager": "deepspeed",
    }


@pytest.mark.parametrize(
    ("layout", "sequence", "published"),
    [
        (Layout(data=8, zero=3, micro_batch=2, batch=16, recompute="selective"), 8192, 82.4),
        (Layout(data=8, zero=3, micro_batch=1, batch=8, recompute="full"), 32768, 83.9),
    ],
)
def test_against_torchtitan(layout: Layout, sequence: int, published: float) -> None:
    """GiB that torch's allocator reserved for Llama 3.1 8B on 8 H100s: torchtitan's docs/performance.md, tables 1 and 2."""
    fullest = plan(library.model("llama-3.1-8b"), layout, FSDP, sequence).fullest
    assert (fullest.total - fullest.runtime) / GIB == pytest.approx(published, rel=0.10)


def test_the_loss_is_planned_in_chunks() -> None:
    from strata.kernels.ops.linear_cross_entropy import linear_cross_entropy as loss

    assert {"gpu": loss.LOGITS_BYTES["cuda"], "cpu": loss.LOGITS_BYTES["cpu"]} == memory.LOGITS_CHUNK
    assert loss.MOST_ROUNDINGS == memory.CHUNKS_ADDED_UP
