"""State, activations, logits, buffers and allowances of pipeline stages, by worked numbers.

A micro-batch has 3 x 96 = 288 tokens. With tensor parallelism 2, a layer has 7,680 + 128 parameters of attention and 15,360 of
its feed-forward block on a GPU; the embedding has 32,000, and the head 32,000 + 64. Five layers on two stages are three and two.
"""

from dataclasses import replace
from typing import Any

import pytest

from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.planner.layout import Layout
from strata.planner.memory.activations import EAGER, FSDP, OWN, UNFUSED, Keeping, layer_parts
from strata.planner.memory.plan import MemoryPlan, StageMemory, no_fit_note, peak_bytes, plan_memory
from strata.planner.worksheet import Worksheet

FLASH = Keeping("flash", "megatron")
ON_CPU = replace(OWN, cpu=True)
GIB = 2**30
SHAPE = Shape("small", layers=5, hidden=64, heads=16, kv_heads=4, head_dim=6, ffn=160, vocab=1000, context=128)
SPARSE = replace(SHAPE, experts=Experts(count=10, top_k=3, ffn=36, shared_ffn=20, dense_layers=1))
LAYOUT = Layout(micro_batch=3, tensor=2, data=5, batch=60, zero=0)  # four micro-batches
STAGED = replace(LAYOUT, pipeline=2)
FIRST, LAST = 3 * 23168 + 32000, 2 * 23168 + 32064  # parameters of a GPU of each stage
OWN_PARAMETERS = 5 * 23168 + 64000 + 64064  # with DeepSpeed, which shards neither embedding nor head


def plan(layout: Layout, keeping: Keeping = FLASH, shape: Shape = SHAPE) -> tuple[StageMemory, ...]:
    found = plan_memory(shape, layout, 80e9, keeping, Worksheet("memory"), 96)
    assert peak_bytes(shape, layout, keeping, 96) == pytest.approx(max(stage.total for stage in found.stages))
    return found.stages


def lines(layout: Layout, keeping: Keeping, shape: Shape = SHAPE, stage: int = 0) -> Worksheet:
    worksheet = Worksheet("memory")
    plan_memory(shape, layout, 80e9, keeping, worksheet, 96)
    return next(part for part in worksheet.parts if part.title == f"stage {stage}")


def layer(layout: Layout, keeping: Keeping) -> float:
    """Its parts are tested in test_memory_activations.py."""
    return layer_parts(SHAPE, layout, keeping, sequence=96).total


# ---------------------------------------------------------------- state


@pytest.mark.parametrize(
    ("zero", "keeping", "precision", "widths"),
    [
        (0, FLASH, "bf16", (2, 2, 12)),
        (0, FLASH, "fp32", (4, 4, 8)),
        (0, FLASH, "fp8", (4, 2, 12)),  # bf16 weights and two fp8 copies
        (0, replace(FLASH, fp32_gradients=True), "bf16", (2, 4, 12)),
        (1, FLASH, "bf16", (2, 2, 12 / 5)),
        (2, FLASH, "bf16", (2, 2 / 5, 12 / 5)),
        (3, FLASH, "bf16", (2 / 5, 2 / 5, 12 / 5)),
        (3, FSDP, "bf16", (4 / 5, 4 / 5, 8 / 5)),
    ],
)
def test_bytes_per_parameter(zero: int, keeping: Keeping, precision: str, widths: tuple[float, ...]) -> None:
    stages = plan(replace(STAGED, zero=zero, precision=precision), keeping)  # type: ignore[arg-type]
    for stage, own in zip(stages, (FIRST, LAST), strict=True):
        assert (stage.parameters, stage.gradients, stage.optimizer) == pytest.approx([width * own for width in widths])


@pytest.mark.parametrize(
    ("change", "gradient", "optimizer"),
    [
        ({"zero": 0}, 2, 12),
        ({"zero": 1}, 4, 12 / 5),
        ({"zero": 1, "batch": 15}, 2, 12 / 5),  # one micro-batch is not added to another
        ({"zero": 1, "batch": 30}, 4, 12 / 5),
        ({"zero": 1, "sequence": 2}, 2, 12 / 10),  # DeepSpeed cannot add up in fp32 there
        ({"zero": 2, "sequence": 2}, 4 / 10, 12 / 10),
        ({"zero": 2, "context": 3}, 4 / 15, 12 / 15),
        ({"zero": 0, "precision": "fp32"}, 4, 8),
        ({"zero": 1, "precision": "fp32"}, 4, 12 / 5),  # DeepSpeed copies weights that are in fp32
    ],
)
def test_state_with_deepspeed(change: dict[str, object], gradient: float, optimizer: float) -> None:
    (stage,) = plan(replace(LAYOUT, **change), OWN)  # type: ignore[arg-type]
    assert stage.gradients == pytest.approx(gradient * OWN_PARAMETERS)
    assert stage.optimizer == pytest.approx(optimizer * OWN_PARAMETERS)
    assert stage.parameters == (4 if change.get("precision") == "fp32" else 2) * OWN_PARAMETERS


def test_experts_are_divided_among_their_own_peers() -> None:
    """Ten experts over five GPUs are two a GPU, each 3 x 64 x 36 / 2 parameters, held by 10 / 5 GPUs."""
    layout = replace(LAYOUT, data=10, expert=5, batch=30, zero=1)
    (stage,) = plan(layout, FLASH, SPARSE)
    attention, shared, router = 7680 + 128, 3 * 64 * 20 / 2, 64 * 10
    dense = 5 * attention + 15360 + 4 * (shared + router) + 32000 + 32064
    experts = 4 * 2 * 3456
    assert stage.parameters == pytest.approx(2 * (dense + experts))
    assert stage.optimizer == pytest.approx(12 * (dense / 10 + experts / 2))
    (few,) = plan(replace(layout, data=1, sequence=4, expert=5, batch=3), FLASH, SPARSE)  # never fewer than one holder
    assert few.optimizer == pytest.approx(12 * (dense / 4 + experts))


def test_tied_embeddings_are_counted_once_where_they_are_together() -> None:
    tied = replace(SHAPE, tied=True)
    assert plan(LAYOUT, FLASH, tied)[0].parameters == 2 * (5 * 23168 + 32000 + 64)
    first, last = plan(STAGED, FLASH, tied)
    assert (first.parameters, last.parameters) == (2 * FIRST, 2 * LAST)


def test_positions_are_whole_on_every_gpu() -> None:
    learned = replace(SHAPE, positions=True)
    assert plan(LAYOUT, FLASH, learned)[0].parameters - plan(LAYOUT, FLASH)[0].parameters == 2 * 128 * 64


def test_narrow_projections_are_whole_on_every_gpu() -> None:
    latent = replace(SHAPE, latent=Latent(query_rank=16, kv_rank=8, plain_dim=6, rotary_dim=4, value_dim=5))
    narrow = 64 * (16 + 8 + 4)
    up = 16 * 16 * 10 + 8 * 16 * 11 + 16 * 5 * 64
    each = narrow + (2 * 64 + 16 + 8) + up / 2 + 15360
    assert plan(LAYOUT, FLASH, latent)[0].parameters == 2 * (5 * each + 32000 + 32064)


@pytest.mark.parametrize(
    ("zero", "offload", "held", "host"),
    [
        (1, "none", (2, 2, 12 / 5), 0),
        (1, "optimizer", (2, 2, 0), 12 / 5 + 4),  # gradients stay; Adam needs them in fp32
        (2, "optimizer", (2, 0, 0), 12 / 5 + 4 / 5),
        (3, "optimizer", (2 / 5, 0, 0), 12 / 5 + 4 / 5),
        (3, "all", (0, 0, 0), 12 / 5 + 4 / 5 + 2 / 5),
    ],
)
def test_offloaded_state(zero: int, offload: str, held: tuple[float, ...], host: float) -> None:
    (stage,) = plan(replace(LAYOUT, zero=zero, offload=offload))  # type: ignore[arg-type]
    own = 5 * 23168 + 64064
    assert (stage.parameters, stage.gradients, stage.optimizer) == pytest.approx([width * own for width in held])
    assert stage.host == pytest.approx(host * own)


def test_workers_on_cpus_do_not_offload() -> None:
    (stage,) = plan(replace(LAYOUT, zero=3, offload="all"), ON_CPU)
    assert stage.host == 0 and stage.parameters > 0 and stage.optimizer > 0


# ---------------------------------------------------------------- activations, logits and the backward pass


def test_activations_of_micro_batches_in_flight() -> None:
    first, last = plan(STAGED)
    assert (first.layers, last.layers) == (3, 2)
    assert first.activations == 2 * 3 * layer(STAGED, FLASH)
    assert last.activations == 2 * layer(STAGED, FLASH) + 2 * 288 * 64 * 2  # inputs of the last norm and of the head
    assert first.logits == 0
    assert last.logits == 288 * 500 * (2 + 4)
    busy = 288 * (64 + 3 * 80) * 2
    assert first.working == busy
    assert last.working == 0  # the loss had more


def test_working_memory_beyond_the_logits() -> None:
    narrow = replace(SHAPE, vocab=100)
    (stage,) = plan(LAYOUT, FLASH, narrow)
    assert stage.logits == 288 * 50 * 6
    assert stage.working == 288 * (64 + 240) * 2 - 288 * 50 * 6
    (plain,) = plan(LAYOUT, FLASH, replace(narrow, gated=False))
    assert plain.working == 288 * (64 + 160) * 2 - 288 * 50 * 6


def test_a_recomputed_layer_is_whole_for_a_time() -> None:
    layout = replace(STAGED, recompute="full")
    first, _ = plan(layout)
    input_bytes = 288 * 64 * 2
    assert first.activations == 2 * 3 * input_bytes
    assert first.working == pytest.approx(288 * 304 * 2 + layer(STAGED, FLASH) - input_bytes)


def test_experts_decide_the_working_memory_where_they_are_larger() -> None:
    (stage,) = plan(LAYOUT, FLASH, replace(SPARSE, vocab=10))
    # 864 copies x (64 + 3 x 18) against 288 x (64 + 240)
    assert stage.working == 864 * (64 + 54) * 2 - 288 * 5 * 6


def test_embedding_dropout_has_a_mask() -> None:
    first, last = plan(STAGED, UNFUSED)
    assert first.activations == 2 * (3 * layer(STAGED, UNFUSED) + 288 * 64)
    assert last.activations == 2 * layer(STAGED, UNFUSED) + 2 * 288 * 64 * 2


@pytest.mark.parametrize(("keeping", "ends"), [(EAGER, 288 * (64 * 8 + 4)), (OWN, 288 * (2 * 64 * 2 + 4))])
def test_last_norm_and_head_of_our_models(keeping: Keeping, ends: float) -> None:
    (stage,) = plan(LAYOUT, keeping)
    assert stage.activations == 5 * layer(LAYOUT, keeping) + ends


def test_gpipe_holds_all_logits() -> None:
    """All four micro-batches are in flight on the last stage; three of them have their softmax in fp32 only."""
    _, last = plan(replace(STAGED, schedule="gpipe"))
    assert last.activations == 4 * (2 * layer(STAGED, FLASH) + 2 * 288 * 64 * 2)
    assert last.logits == 3 * 4 * 288 * 500 + 288 * 500 * 6
    _, sharded = plan(replace(STAGED, schedule="gpipe"), FSDP)
    assert sharded.logits == 3 * 4 * 288 * 500 + 3 * 4 * 288 * 500 + 32064 * 2


def test_logits_of_torch() -> None:
    """Log-probabilities and two gradients in fp32, and the gradient of the head's matrix."""
    (fsdp,) = plan(LAYOUT, FSDP)
    assert fsdp.logits == 3 * 4 * 288 * 500 + 32064 * 2
    (eager,) = plan(LAYOUT, EAGER)
    assert eager.logits == 3 * 4 * 288 * 1000 + 64064 * 2
    _, staged = plan(STAGED, EAGER)
    assert staged.logits == 3 * 4 * 288 * 1000 + 64064 * 2 + 288 * 1000 * 2


def test_logits_in_chunks() -> None:
    """512 MiB of logits at a time on GPUs and 16 MiB on CPUs; beyond eight chunks, gradients are added up in fp32."""
    (small,) = plan(LAYOUT, OWN)
    assert small.logits == 288 * 1000 * 2 + 64064 * 2
    per_chunk = 2**24 / (288 * 2)  # words of a vocabulary whose logits are one chunk on a CPU
    wide = replace(SHAPE, vocab=2**19)  # 18 chunks
    head = 2**19 * 64 + 64
    (many,) = plan(LAYOUT, ON_CPU, wide)
    assert many.logits == 2**24 + head * 2 + 4 * head
    (in_fp32,) = plan(replace(LAYOUT, precision="fp32"), ON_CPU, wide)
    assert in_fp32.logits == 2**24 + head * 4
    some = int(8 * per_chunk)  # just below eight chunks
    (few,) = plan(LAYOUT, ON_CPU, replace(SHAPE, vocab=some))
    assert few.logits == 2**24 + (some * 64 + 64) * 2
    (more,) = plan(LAYOUT, ON_CPU, replace(SHAPE, vocab=some + 1))
    assert more.logits == 2**24 + ((some + 1) * 64 + 64) * 6
    (on_gpu,) = plan(LAYOUT, OWN, replace(SHAPE, vocab=2**20))
    assert on_gpu.logits == 2**29 + (2**20 * 64 + 64) * 2


def test_exactly_eight_chunks_are_not_added_up_in_fp32() -> None:
    layout = replace(LAYOUT, micro_batch=2, batch=40)
    shape = replace(SHAPE, vocab=2**18)
    found = plan_memory(shape, layout, 80e9, ON_CPU, Worksheet("memory"), 128).stages[0]  # 256 x 2^18 x 2 = 8 x 2^24 bytes
    assert found.logits == 2**24 + (2**18 * 64 + 64) * 2


# ---------------------------------------------------------------- buffers


def test_gradients_of_one_unit_are_gathered_at_a_time() -> None:
    assert plan(LAYOUT)[0].buffers == 0
    assert plan(replace(LAYOUT, zero=1))[0].buffers == 0
    assert plan(replace(LAYOUT, zero=2))[0].buffers == 32064 * 2  # the head is larger than a layer of 23,168
    assert plan(replace(LAYOUT, zero=3))[0].buffers == 32064 * 2 + 2 * 32064 * 2
    assert plan(replace(LAYOUT, zero=3), FSDP)[0].buffers == 32064 * 4 + 2 * 32064 * 2
    narrow = replace(SHAPE, vocab=100)
    assert plan(replace(LAYOUT, zero=2), FLASH, narrow)[0].buffers == 23168 * 2


def test_stages_between_the_ends_have_no_table() -> None:
    staged = replace(STAGED, pipeline=5, zero=2, batch=75)
    passed = 2 * 288 * 64 * 2
    assert [stage.buffers - passed for stage in plan(staged)] == [32064 * 2, *[23168 * 2] * 3, 32064 * 2]


def test_a_layer_with_its_experts_is_a_unit() -> None:
    sparse = 7680 + 128 + 64 * 10 + 3 * 64 * 20 / 2 + 10 * 3 * 64 * 36 / 2
    assert plan(replace(LAYOUT, zero=2), FLASH, SPARSE)[0].buffers == sparse * 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"pipeline": 2}, 2 * 288 * 64 * 2),
        ({"pipeline": 2, "sequence_parallel": True}, 2 * 144 * 64 * 2 + 288 * 64 * 2),
        ({"sequence_parallel": True}, 288 * 64 * 2),
        ({"context": 2}, 2 * 144 * 24 * 2),
        ({"sequence": 2, "precision": "fp32", "context": 2}, 2 * 72 * 24 * 4),
    ],
)
def test_tensors_in_transit(change: dict[str, object], expected: float) -> None:
    assert plan(replace(LAYOUT, **change))[0].buffers == expected  # type: ignore[arg-type]


def test_tokens_on_their_way_to_experts() -> None:
    (stage,) = plan(replace(LAYOUT, expert=5), FLASH, SPARSE)
    assert stage.buffers == 288 * 3 * 1.25 * 64 * 2


@pytest.mark.parametrize(
    ("change", "keeping", "expected"),
    [
        ({"zero": 1}, OWN, 1e8 + OWN_PARAMETERS * 2 + OWN_PARAMETERS / 5 * 2),
        ({"zero": 2, "precision": "fp32"}, OWN, 2e8 + OWN_PARAMETERS * 4 + OWN_PARAMETERS / 5 * 4),
        ({"zero": 3}, OWN, 1e8 + 3 * OWN_PARAMETERS * 2),
        # On CPUs only touched memory counts, and gloo has buffers of its own.
        ({"zero": 1}, ON_CPU, (2 + 1 / 5 + 1) * OWN_PARAMETERS * 2),
        ({"zero": 3}, ON_CPU, 5 * OWN_PARAMETERS * 2),
    ],
)
def test_buckets_of_deepspeed(change: dict[str, object], keeping: Keeping, expected: float) -> None:
    (stage,) = plan(replace(LAYOUT, **change), keeping)  # type: ignore[arg-type]
    assert stage.buffers == pytest.approx(expected)


def test_buckets_hold_experts_too() -> None:
    (stage,) = plan(replace(LAYOUT, zero=1, expert=5), OWN, SPARSE)
    common = 5 * 7808 + 15360 + 4 * (640 + 1920) + 64000 + 64064
    own = common + 4 * 2 * 3456
    assert stage.buffers == pytest.approx(1e8 + own * 2 + own / 5 * 2 + 288 * 3 * 1.25 * 64 * 2)


def test_buckets_do_not_grow_with_the_model() -> None:
    """5e7 gradients a bucket, 1e9 gathered parameters, 5e7 on their way, of two bytes each."""
    large = replace(SHAPE, vocab=2**24)  # 1.07e9 parameters in each table
    (three,) = plan(replace(LAYOUT, zero=3), OWN, large)
    assert three.buffers == 1e8 + 1e8 + 2e9 + 1e8
    (on_cpu,) = plan(replace(LAYOUT, zero=3), ON_CPU, large)
    assert on_cpu.buffers == 1e8 + 1e8 + 2e9 + 1e8 + 1e8
    own = 5 * 23168 + 2**24 * 128 + 64
    (one,) = plan(replace(LAYOUT, zero=1), OWN, large)
    assert one.buffers == pytest.approx(1e8 + 1e8 + own / 5 * 2)


def test_without_zero_gradients_are_summed_in_buckets() -> None:
    """A copy of all gradients, and the fp32 ones of the step as far as the backward pass has left no space for them."""
    (stage,) = plan(LAYOUT, OWN)
    left = stage.activations + stage.logits + stage.working
    assert stage.buffers == OWN_PARAMETERS * 2 + max(0, 4 * OWN_PARAMETERS - left)
    large = replace(SHAPE, ffn=160 * 2000)
    (wide,) = plan(replace(LAYOUT, micro_batch=1), OWN, large)
    own = 5 * (7808 + 15360 * 2000) + 64000 + 64064
    assert wide.buffers == pytest.approx(own * 2 + 4 * own - wide.activations - wide.logits - wide.working)
    (in_fp32,) = plan(replace(LAYOUT, precision="fp32"), OWN)
    assert in_fp32.buffers == OWN_PARAMETERS * 4
    (alone,) = plan(replace(LAYOUT, data=1, batch=12, precision="fp32"), OWN)
    assert alone.buffers == 0
    (sequence,) = plan(replace(LAYOUT, data=1, sequence=2, batch=12, precision="fp32"), OWN)
    assert sequence.buffers == OWN_PARAMETERS * 4


def test_a_pipeline_has_no_buckets_without_zero() -> None:
    first, _ = plan(replace(STAGED, precision="fp32"), OWN)
    assert first.buffers == 2 * 288 * 64 * 4


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        (SHAPE, OWN_PARAMETERS * 2),  # all gradients are less than 25 MiB
        (replace(SHAPE, ffn=160 * 1000), 25 * 2**20),
        (replace(SHAPE, vocab=300_000), 300_000 * 64 * 2),  # a gradient is not cut
    ],
)
def test_gradients_in_shared_memory(shape: Shape, chunk: float) -> None:
    """Two sets of five chunks."""
    (stage,) = plan(LAYOUT, ON_CPU, shape)
    assert stage.buffers == pytest.approx(chunk * 10)


# ---------------------------------------------------------------- allowances and totals


def test_allowances_on_gpus() -> None:
    (stage,) = plan(LAYOUT)
    assert stage.gaps == pytest.approx(0.05 * (stage.activations + stage.logits + stage.working))
    assert stage.runtime == pytest.approx(1.8 * GIB)  # CUDA's context and NCCL's buffers
    (alone,) = plan(Layout(micro_batch=3, batch=12))
    assert alone.runtime == pytest.approx(0.8 * GIB)


def test_allowances_on_cpus() -> None:
    """Half of what a pass leaves behind is not used again, three quarters where tensors are sharded, all with ZeRO-3."""
    once = {tensor: plan(replace(LAYOUT, tensor=tensor), ON_CPU)[0] for tensor in (1, 2)}
    for tensor, share in ((1, 0.5), (2, 0.75)):
        stage = once[tensor]
        assert stage.gaps == pytest.approx(share * (stage.activations + stage.logits + stage.working))
        assert stage.runtime == 0
    stage = once[2]
    passing = stage.activations + stage.logits + stage.working
    (one,) = plan(replace(LAYOUT, zero=1), ON_CPU)
    assert one.gaps == pytest.approx(0.75 * passing + OWN_PARAMETERS * 2 * (1 + 1 / 5))
    (three,) = plan(replace(LAYOUT, zero=3), ON_CPU)
    assert three.gaps == pytest.approx(passing + 4 * OWN_PARAMETERS * 2)


def test_gaps_of_a_pipeline_on_cpus_count_one_micro_batch() -> None:
    first, _ = plan(STAGED, ON_CPU)
    assert first.gaps == pytest.approx(0.75 * (first.activations / 2 + first.logits + first.working))


def test_v_shaped_schedules_hold_both_ends_on_the_first_stage() -> None:
    """Parts of 1, 1, 2 and 1 layers: stage 0 has the first and the last."""
    layout = replace(STAGED, schedule="zbv", interleave=2)
    first, last = plan(layout)
    assert (first.layers, last.layers) == (2, 3)
    assert first.parameters == 2 * (2 * 23168 + 32000 + 32064)
    assert last.parameters == 2 * 3 * 23168
    assert first.logits > 0 and last.logits == 0


def stage(number: int, **terms: float) -> StageMemory:
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "working", "buffers", "gaps", "runtime", "host")
    return StageMemory(number, 1, **{name: terms.get(name, 1.0) for name in names})


def test_totals_of_a_plan() -> None:
    small, large = stage(0, host=99), stage(1, activations=5.0)
    found = MemoryPlan((small, large), 13.0)
    assert (small.total, large.total) == (9, 13)
    assert found.fullest is large and found.peak == 13
    assert large.largest == "activations" and found.where == "stage 1, activations"
    assert found.fits and no_fit_note(found) == ""
    tight = MemoryPlan((small, large), 12.9)
    assert not tight.fits and no_fit_note(tight) == "does not fit by plan: 13 B of 12.9 B"


def test_a_stage_without_layers_holds_nothing_of_the_model() -> None:
    empty = plan(replace(STAGED, pipeline=4), FLASH, replace(SHAPE, layers=1))[2]
    assert empty.layers == 0
    assert (empty.parameters, empty.activations, empty.logits, empty.working) == (0, 0, 0, 0)


def test_stages_in_the_middle_are_explained_only_where_they_can_be_fullest() -> None:
    worksheet = Worksheet("memory")
    plan_memory(SHAPE, replace(STAGED, pipeline=5, batch=75), 80e9, FLASH, worksheet, 96)
    assert [part.title for part in worksheet.parts] == ["stage 0", "stage 4"]


def test_the_last_stage_is_explained_even_where_it_equals_the_first() -> None:
    worksheet = Worksheet("memory")
    plan_memory(replace(SHAPE, layers=4), replace(STAGED, schedule="dualpipe"), 80e9, FLASH, worksheet, 96)
    assert [part.title for part in worksheet.parts] == ["stage 0", "stage 1"]


@pytest.mark.parametrize("schedule", ["dualpipe", "zbv", "1f1b"])
def test_a_single_stage_holds_the_model_once(schedule: Any) -> None:
    assert plan(replace(LAYOUT, schedule=schedule))[0].parameters == 2 * (5 * 23168 + 64064)


def test_sequences_have_the_context_length_by_default() -> None:
    by_default = plan_memory(SHAPE, LAYOUT, 80e9, FLASH, Worksheet("memory"))
    assert by_default == plan_memory(SHAPE, LAYOUT, 80e9, FLASH, Worksheet("memory"), 128)
    assert peak_bytes(SHAPE, LAYOUT, FLASH) == by_default.peak
    assert peak_bytes(SHAPE, LAYOUT, FLASH, 96) < by_default.peak


def test_lines_of_a_stage() -> None:
    part = lines(replace(STAGED, batch=45), FLASH, stage=1)
    assert (part["in_flight"], part["stage"], part["pipeline"], part["micro_batches"]) == (1, 1, 2, 3)
    assert lines(replace(STAGED, batch=3), FLASH)["micro_batches"] == 1
    assert lines(LAYOUT, FLASH)["in_flight"] == 1
