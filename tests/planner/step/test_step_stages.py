"""Parts of a model on pipeline stages, their work, and the terms of a step, by worked numbers."""

from dataclasses import replace
from typing import Any

import pytest

from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.planner.catalogue.software import program
from strata.planner.collectives.cost import cost, links
from strata.planner.collectives.patterns import Place
from strata.planner.layout import Layout
from strata.planner.pipeline.simulate import Times, quick_total
from strata.planner.step import stages, step
from strata.planner.step.communication import Exchange, Ground, Reduction
from strata.planner.step.compute import Cut, LayerTime
from strata.planner.step.stages import Exchanges, ExchangeTime, Layers, Work, layers_of, parts_of, stage_parameters, works_of
from strata.planner.worksheet import Worksheet
from strata.platform.hardware import catalogue as hardware

SHAPE = Shape("small", layers=5, hidden=64, heads=16, kv_heads=4, head_dim=6, ffn=160, vocab=1000, context=128)
SPARSE = replace(SHAPE, experts=Experts(count=10, top_k=3, ffn=36, shared_ffn=20, dense_layers=2))
GPU = replace(hardware.gpu("h100"), bandwidth=1e11, pcie=1e10)  # streams at 6.5e10 B/s
NDR = hardware.fabric("ndr-400")
LINKS = links(GPU, NDR, launch=0.0)
CORE, STRATA, FSDP = program("megatron-core"), program("strata"), program("torch-fsdp")
APART = replace(CORE, overlaps_data=False, overlaps_tensor=False)
NOTHING = Reduction((), (), (), ())
LAYERS = Layers(
    dense=LayerTime(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    sparse=LayerTime(10.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    head=LayerTime(100.0, 200.0, 0.0, 0.0, 500.0, 600.0),
)


def exchange(dimension: str, seconds: float, times: float = 1) -> Exchange:
    return Exchange(dimension, "send", 1.0, times, Place(1), seconds, 1.0, "ring")


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("layers", "parts", "counts"),
    [
        (5, 1, [5]),
        (5, 2, [3, 2]),
        (5, 3, [2, 2, 1]),
        (5, 4, [1, 2, 1, 1]),
        (6, 4, [1, 2, 2, 1]),
        (7, 4, [2, 2, 2, 1]),
        (8, 4, [2, 2, 2, 2]),
        (11, 4, [3, 3, 3, 2]),
        (5, 5, [1, 1, 1, 1, 1]),
    ],
)
def test_left_over_layers_are_in_the_middle(layers: int, parts: int, counts: list[int]) -> None:
    assert layers_of(replace(SHAPE, layers=layers), parts) == [(count, 0) for count in counts]


def test_dense_layers_come_first() -> None:
    assert layers_of(replace(SPARSE, layers=6), 4) == [(1, 0), (1, 1), (0, 2), (0, 1)]
    assert layers_of(SPARSE, 1) == [(2, 3)]


@pytest.mark.parametrize(
    ("schedule", "interleave", "parts"),
    [("1f1b", 1, 3), ("interleaved", 4, 12), ("zbv", 1, 6), ("dualpipev", 2, 6), ("dualpipe", 1, 3)],
)
def test_parts_of_a_layout(schedule: Any, interleave: int, parts: int) -> None:
    assert parts_of(Layout(pipeline=3, schedule=schedule, interleave=interleave)) == parts


# A layer has 15,360 + 128 parameters of attention and 30,720 of its block; each table has 64,000.
DENSE, TABLE = 15360 + 128 + 30720, 64000


@pytest.mark.parametrize(
    ("layout", "own"),
    [
        (Layout(), 5 * DENSE + 2 * TABLE + 64),
        (Layout(tensor=2), (5 * DENSE + 2 * TABLE + 64) / 2),
        (Layout(pipeline=2), 3 * DENSE + TABLE),  # stages of 3 and 2 layers
        (Layout(pipeline=3), 2 * DENSE + TABLE),  # the first of 2, 2 and 1
        (Layout(pipeline=5), DENSE + TABLE + 64),  # the last, with the norm
        (Layout(pipeline=2, schedule="zbv", interleave=2), 2 * DENSE + 2 * TABLE + 64),
        (Layout(pipeline=2, schedule="dualpipe"), 5 * DENSE + 2 * TABLE + 64),
    ],
)
def test_parameters_of_the_largest_stage(layout: Layout, own: float) -> None:
    assert stage_parameters(SHAPE, layout, layers_of(SHAPE, parts_of(layout))) == (own, 0)


def test_the_largest_stage_counts_experts() -> None:
    """Stages of two dense layers and a sparse one, and of two sparse ones. A sparse layer has a router of 640 parameters, a
    shared expert of 3,840 and ten experts of 192 for each number of their width."""
    layout, sparse = Layout(pipeline=2, tensor=2, expert=5), 15360 + 128 + 640 + 3840
    first = (2 * DENSE + sparse + TABLE) / 2
    assert stage_parameters(SPARSE, layout, layers_of(SPARSE, 2)) == (first, 10 * 192 * 36 / 2 / 5)
    assert SPARSE.experts
    wide = replace(SPARSE, experts=replace(SPARSE.experts, ffn=720))
    last = (2 * sparse + TABLE + 64) / 2
    assert stage_parameters(wide, layout, layers_of(wide, 2)) == (last, 2 * 10 * 192 * 720 / 2 / 5)


def test_cut_of_a_layout() -> None:
    layout = Layout(micro_batch=3, sequence=2, context=4, tensor=8, expert=5, precision="fp8")
    assert stages.cut_of(layout, 96) == Cut(tokens=36, sequence=96, tensor=8, split=1, expert=5, precision="fp8")
    assert stages.cut_of(replace(layout, sequence_parallel=True), 96).split == 8


# ---------------------------------------------------------------- work


def test_forward_and_backward_of_a_part() -> None:
    work = Work(LAYERS.dense, again=0.5, exchange=ExchangeTime(0.1, 0.2, 0.4), passes=3, gathered=(0.01, 0.02))
    assert work.exchange.total == pytest.approx(0.7)
    assert work.exchange.times(2) == ExchangeTime(0.2, 0.4, 0.8)
    assert work.forward == pytest.approx(1 + 3 + 5 + 0.7 + 0.01)
    assert work.backward == pytest.approx(1 + 4 + 6 + 0.5 + 2 * 0.7 + 0.02)
    assert work.weight == 2


def works(layout: Layout, software: Any = APART, counts: Any = ((2, 1), (0, 3)), own: float = 0.0, **more: Any) -> list[Work]:
    given = {"tensor": [], "sequence": [], "expert": [], "send": None, "reduction": NOTHING} | more
    return works_of(LAYERS, list(counts), layout, software, GPU, Exchanges(**given), own)


def test_work_of_each_part() -> None:
    first, last = works(Layout(pipeline=2))
    assert first.compute == LayerTime(12, 24, 36, 48, 60, 72)
    assert last.compute == LayerTime(130, 260, 90, 120, 650, 780)  # with the head
    assert (first.again, first.passes, first.gathered) == (0, 2, (0, 0))
    assert first.exchange == ExchangeTime()


def test_gradients_are_read_and_added_up() -> None:
    """Twice four bytes for 1.3e11 parameters in two chunks, at 6.5e10 B/s."""
    first, second = works(Layout(), replace(APART, gradient_bytes=4), own=1.3e11)
    assert first.compute.weight == pytest.approx(24 + 2 * 4 * 1.3e11 / 2 / 6.5e10)
    assert second.compute.weight == pytest.approx(260 + 8)
    staged, _ = works(Layout(pipeline=2), replace(APART, gradient_bytes=4), own=1.3e11)
    assert staged.compute.weight == pytest.approx(24 + 16)


@pytest.mark.parametrize(
    ("recompute", "software", "again", "passes"),
    [
        ("full", CORE, 12 + 36 + 60, 3),
        ("selective", CORE, 36, 2),
        ("selective", STRATA, 60, 2),
        ("selective", FSDP, 60 + 12 / 2, 2),
    ],
)
def test_recomputed_work_leaves_out_the_head(recompute: Any, software: Any, again: float, passes: int) -> None:
    first, last = works(Layout(pipeline=2, recompute=recompute), software)
    assert (first.again, first.passes) == (pytest.approx(again), passes)
    assert last.again == pytest.approx(again * 30 / 12)


def test_exchanges_of_each_layer() -> None:
    given = {
        "tensor": [exchange("tensor", 0.5, 2)],
        "sequence": [exchange("sequence", 0.25, 3), exchange("context", 2.0, 2)],
        "expert": [exchange("expert", 0.125, 2)],
    }
    first, last = works(Layout(pipeline=2), **given)
    assert first.exchange == ExchangeTime(3 * 1.0, 3 * (0.75 + 1.0), 1 * 0.25)  # the ring's 4 s are beside 3 s of attention
    assert last.exchange == ExchangeTime(3 * 1.0, 3 * 1.75, 3 * 0.25)
    hidden, _ = works(Layout(pipeline=2), replace(APART, overlaps_tensor=True), **given)
    assert hidden.exchange.tensor == 3 * 0.25
    covered, _ = works(Layout(pipeline=2), sequence=[exchange("context", 1.5, 2)])
    assert covered.exchange.sequence == 0


def test_communication_beside_compute_slows_it() -> None:
    assert stages.seen_beside(3.0, 10.0) == pytest.approx(0.45)
    assert stages.seen_beside(10.0, 3.0) == pytest.approx(7 + 0.45)
    assert stages.seen_beside(3.0, 3.0) == pytest.approx(0.45)


def test_gathered_parameters_are_beside_their_pass() -> None:
    """Two chunks share 400 s of gathering forwards and 800 backwards."""
    reduction = Reduction((), (), (exchange("data", 200.0, 2),), (exchange("data", 400.0, 2),))
    first, second = works(Layout(), APART, reduction=reduction)
    assert first.gathered == second.gathered == (200, 400)
    beside, _ = works(Layout(), replace(APART, overlaps_data=True), reduction=reduction)
    # forwards 12 + 36 + 60 s, backwards 12 + 48 + 72 s and 24 s of weight gradients
    assert beside.gathered == pytest.approx((200 - 108 + 0.15 * 108, 400 - 156 + 0.15 * 156))


def test_exchanges_of_a_layout_are_in_its_precision() -> None:
    ground = Ground(8, 8, LINKS)
    layout = Layout(tensor=2, pipeline=2, data=2, zero=1, precision="fp32")
    found = stages.exchanges_of(SHAPE, layout, 96.0, (1000.0, 0.0), CORE, ground)
    assert found.tensor[0].size == 96 * 64 * 4 and found.send and found.send.size == 96 * 64 * 4 / 2
    assert found.reduction.gather[0].size == 4000
    narrow = stages.exchanges_of(SPARSE, replace(layout, precision="fp8", expert=2, sequence=2), 96.0, (1.0, 1.0), CORE, ground)
    assert narrow.tensor[0].size == 96 * 64 * 2
    assert narrow.expert[0].size == 96 * 3 * 64 * 2 / 2
    assert [each.dimension for each in narrow.sequence] == ["sequence", "sequence"]


# ---------------------------------------------------------------- the step


def plan(layout: Layout, software: Any = APART, shape: Shape = SHAPE, sequence: int | None = 96) -> tuple[step.Step, Worksheet]:
    worksheet = Worksheet("test")
    return step.plan_step(shape, layout, GPU, NDR, software, worksheet, sequence, lambda cut: LAYERS), worksheet


def test_a_step_on_one_gpu() -> None:
    """Four micro-batches of five layers and the head; Adam moves 24 + 2 bytes and twice the gradient's two."""
    found, _ = plan(Layout(batch=8, micro_batch=2, zero=0))
    own = 5 * DENSE + 2 * TABLE + 64
    forward = 5 * (1 + 3 + 5) + 600
    backward = 5 * (1 + 4 + 6) + 700
    weight = 5 * 2 + 200 + 2 * 2 * own / 6.5e10
    optimizer = own * 30 / 6.5e10
    seconds = 4 * (forward + backward + weight) + optimizer
    assert found.seconds == pytest.approx(seconds)
    assert found.times.transfer == () and found.exchanges == ()
    assert found.spent["optimizer"] == pytest.approx(optimizer)
    assert found.spent["pipeline bubble"] == pytest.approx(0, abs=1e-9)
    assert found.spent["matrix products"] == pytest.approx(4 * (2 * (5 + 100) + weight))
    assert found.spent["attention"] == pytest.approx(4 * 5 * 7)
    assert found.spent["memory-bound kernels"] == pytest.approx(4 * (5 * 11 + 1100))
    assert found.limit == "memory-bound kernels"
    matrices = 5 * (15360 + 30720) + TABLE
    flops = 3 * (2 * matrices + 5 * 2 * 96 * 16 * 12) * 8 * 96
    assert found.model_flops == found.hardware_flops == pytest.approx(flops)
    assert found.tokens_per_s == pytest.approx(8 * 96 / seconds)
    assert found.mfu == pytest.approx(flops / seconds / GPU.flops["bf16"])


def test_mfu_is_over_all_gpus_and_hfu_counts_recomputation() -> None:
    found, _ = plan(Layout(data=2, batch=8, recompute="full"))
    forward = 2 * (5 * (15360 + 30720) + TABLE) + 5 * 2 * 96 * 16 * 12
    assert found.hardware_flops == pytest.approx((4 * forward - 2 * TABLE) * 8 * 96)  # the head is not recomputed
    assert found.mfu == pytest.approx(3 * forward * 8 * 96 / (found.seconds * 2 * GPU.flops["bf16"]))
    assert found.hfu == pytest.approx(found.mfu * found.hardware_flops / found.model_flops)
    selective, _ = plan(Layout(data=2, batch=8, recompute="selective"))
    assert selective.hardware_flops == pytest.approx((3 * forward + 5 * 2 * 96 * 16 * 12) * 8 * 96)


def test_sequences_have_the_context_length_by_default() -> None:
    assert plan(Layout(batch=8), sequence=None)[1].parts[-1]["batch_tokens"] == 8 * 128


def test_a_pipeline_is_simulated() -> None:
    layout = Layout(pipeline=2, data=2, batch=16, micro_batch=2, zero=1)
    found, _ = plan(layout)
    send = cost("send", 2 * 96 * 64 * 2, Place(1), LINKS).seconds
    assert found.times.transfer == (send,)
    assert found.times.hidden == ()
    pipeline = quick_total("1f1b", 2, 4, 1, found.times)
    data = sum(each.seconds for each in found.exchanges if each.dimension == "data")
    assert found.spent["data parallelism"] == pytest.approx(data)
    assert found.seconds == pytest.approx(pipeline + data + found.spent["optimizer"])
    busy = sum(sum(found.times.forward) + sum(found.times.backward) + sum(found.times.weight) for _ in range(4)) / 2
    assert found.spent["pipeline bubble"] == pytest.approx(pipeline - busy)
    assert [(each.dimension, each.times) for each in found.exchanges] == [("pipeline", 8), ("data", 1), ("data", 1)]


def test_overlapped_communication_costs_a_share() -> None:
    work = Work(LayerTime(1, 2, 3, 4, 5, 6), 0.5, ExchangeTime(10, 20, 40), 2, (7, 8))
    times = step._times([work, work], Layout(pipeline=1, schedule="dualpipev"), exchange("pipeline", 0.25))
    assert times.hidden == pytest.approx((70 * 0.85, 70 * 0.85))
    assert times.transfer == (0.25,)
    plain = step._times([work, work], Layout(pipeline=2), None)
    assert (plain.hidden, plain.transfer) == ((), (0.0,))
    share = 6 / 2
    layout = Layout(pipeline=2, data=2, micro_batch=3, batch=36)
    spent = step._spent([work, replace(work, passes=3)], layout)
    assert spent == {
        "matrix products": 2 * 4 * share,
        "attention": 2 * 7 * share,
        "memory-bound kernels": 2 * 11 * share,
        "recompute": 2 * 0.5 * share,
        "tensor parallelism": 5 * 10 * share,
        "sequence parallelism": 5 * 20 * share,
        "expert parallelism": 5 * 40 * share,
        "parameters gathered": 30 * share,
    }
    for schedule in ("dualpipe", "dualpipev"):
        covered = step._spent([work, replace(work, passes=3)], replace(layout, schedule=schedule))
        assert covered["tensor parallelism"] == pytest.approx(5 * 10 * share * 0.15)
        assert covered["sequence parallelism"] == pytest.approx(5 * 20 * share * 0.15)
        assert covered["expert parallelism"] == pytest.approx(5 * 40 * share * 0.15)


@pytest.mark.parametrize(
    ("reduce", "gather", "seen"),
    [
        # The middle part's backward pass takes 2 x (1 + 4 + 6 + 2) = 26 s in two chunks, its forward pass 18 s.
        (16.0, 8.0, 16 / 16 + 8 / 16 + 0.15 * (16 + 8)),
        (36.0, 38.0, 10 + 20 + 0.15 * (26 + 18)),
    ],
)
def test_data_parallelism_beside_the_last_pass(reduce: float, gather: float, seen: float) -> None:
    work, other = (Work(part, 0.0, ExchangeTime(), 2) for part in (LAYERS.dense, LAYERS.sparse))
    reduction = Reduction((exchange("data", reduce),), (exchange("data", gather),), (), ())
    layout = Layout(pipeline=2)
    found = step._data_seen(reduction, [other, other, work, other], layout, CORE, Worksheet("test"))
    assert found == pytest.approx(seen)
    assert step._data_seen(reduction, [other, other, work, other], layout, APART, Worksheet("test")) == reduce + gather


@pytest.mark.parametrize(
    ("layout", "updated"),
    [
        (Layout(data=3, sequence=2, context=2, zero=0), 1200 + 240),
        (Layout(data=3, sequence=2, context=2, zero=1), 100 + 20),
        (Layout(data=3, sequence=2, context=2, zero=3, expert=4), 100 + 240 / 3),
        (Layout(data=3, zero=1, expert=6), 400 + 240),
    ],
)
def test_parameters_that_a_gpu_updates(layout: Layout, updated: float) -> None:
    found = step._optimizer((1200.0, 240.0), layout, GPU, FSDP, Worksheet("test"))
    assert found == pytest.approx(updated * (26 + 2 * 4) / 6.5e10)
    offloaded = step._optimizer((1200.0, 240.0), replace(layout, offload="optimizer"), GPU, FSDP, Worksheet("test"))
    assert offloaded == pytest.approx(updated * (34 / 40e9 + 6 / 1e10))


def test_tied_embeddings_are_summed_between_first_and_last_stage() -> None:
    tied, ground = replace(SHAPE, tied=True), Ground(8, 32, LINKS)
    layout = Layout(tensor=2, data=8, pipeline=2)
    expected = cost("all_reduce", TABLE / 2 * 4, Place(1, 2, 8), LINKS).seconds  # stages are 16 GPUs apart
    assert step._tied(tied, layout, FSDP, ground) == expected > 0
    assert step._tied(SHAPE, layout, FSDP, ground) == 0
    assert step._tied(tied, replace(layout, pipeline=1), FSDP, ground) == 0
    for schedule in ("zbv", "dualpipev"):
        assert step._tied(tied, replace(layout, schedule=schedule, interleave=2), FSDP, ground) == 0
    found, _ = plan(Layout(pipeline=2, batch=8), shape=tied)
    parts = found.spent["tied embedding"]
    assert parts > 0 and found.seconds == pytest.approx(sum(found.spent.values()))


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("selective", 2), ("full", 3)])
def test_exchanges_counted_over_a_step(recompute: Any, passes: int) -> None:
    """Six micro-batches; stage 0 holds parts of 2 + 1 and 0 + 2 layers, stage 1 of 1 + 1 and 0 + 4."""
    layout = Layout(pipeline=2, data=2, micro_batch=3, batch=36, recompute=recompute)
    counts = [(2, 1), (1, 1), (0, 2), (0, 4)]
    reduction = Reduction(*((exchange("data", index),) for index in (1.0, 2.0, 3.0, 4.0)))
    given = Exchanges(
        tensor=[exchange("tensor", 1.0, 2)],
        sequence=[exchange("sequence", 1.0, 3)],
        expert=[exchange("expert", 1.0, 2)],
        send=exchange("pipeline", 1.0),
        reduction=reduction,
    )
    found = [(each.dimension, each.times) for each in step._over_the_step(given, layout, counts)]
    assert found == [
        ("tensor", 2 * passes * 6 * 6),
        ("sequence", 3 * passes * 6 * 6),
        ("expert", 2 * passes * 5 * 6),
        ("pipeline", 2 * 6 * 2),
        ("data", 1),
        ("data", 1),
        ("data", 6),
        ("data", 6),
    ]
    assert (
        step._over_the_step(replace(given, send=None, tensor=[], sequence=[], expert=[], reduction=NOTHING), layout, counts) == ()
    )


def test_one_part_needs_no_simulation() -> None:
    times = Times((3.0,), (5.0,), (7.0,), ())
    assert step._pipeline(times, Layout(data=2, batch=12)) == 6 * 15
    two = Times((3.0, 4.0), (5.0, 6.0), (7.0, 8.0), (0.0,))
    assert step._pipeline(two, Layout(pipeline=2, batch=1)) == 3 + 4 + (6 + 8) + (5 + 7)  # one micro-batch there and back


def test_latent_attention_recomputes_its_own_flops() -> None:
    latent = replace(SHAPE, latent=Latent(query_rank=17, kv_rank=12, plain_dim=7, rotary_dim=5, value_dim=9))
    assert step._recomputed(latent, Layout(recompute="selective"), 96) == 5 * 2 * 96 * 16 * 21
    assert step._recomputed(latent, Layout(), 96) == 0
