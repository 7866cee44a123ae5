"""Lower bounds of the search against exact plans: every difference is a term that the bound leaves out by design."""

import statistics
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from strata.planner.catalogue.shape import Experts, Shape
from strata.planner.catalogue.software import Software, program
from strata.planner.layout import Recompute
from strata.planner.memory.activations import keeping_of, layer_parts
from strata.planner.memory.plan import StageMemory, plan_memory
from strata.planner.search.memory_bounds import MemoryBounds
from strata.planner.search.space import Family, Pipeline, Slice, layout_of
from strata.planner.search.time_bounds import TimeBounds
from strata.planner.step.step import Step, plan_step
from strata.planner.worksheet import Worksheet
from strata.platform.hardware import catalogue as hardware
from strata.platform.hardware.specs import Fabric

H100, NDR = hardware.gpu("h100"), hardware.fabric("ndr-400")
SLOW = Fabric("one card of 8 Gb/s", nic=1e9, nics=1, kind="roce", topology="fat-tree")
OVERLAPPED, APART = program("megatron-core"), program("megatron-2022")
DENSE = Shape("dense", 8, 1024, 16, 8, 64, 2816, 32000, 4096)
SPARSE = replace(DENSE, name="sparse", experts=Experts(count=8, top_k=2, ffn=1408, shared_ffn=512, dense_layers=3))
ALONE = Slice(tensor=1, sequence_parallel=False, sequence=1, context=1, micro_batch=1, expert=1)
ONE, GIB = Pipeline(1, "1f1b", 1), 2**30
MEMORY_RATE = H100.bandwidth * 0.65


def step_of(bounds: TimeBounds, family: Family, zero: int) -> Step:
    layout = layout_of(family, bounds.precision, zero)
    return plan_step(bounds.shape, layout, H100, bounds.fabric, bounds.software, Worksheet(""), 4096, bounds.layers)


def bounds_of(shape: Shape = DENSE, software: Software = OVERLAPPED, fabric: Fabric = NDR, precision: Any = "bf16") -> TimeBounds:
    return TimeBounds(shape, H100, fabric, software, 4096, precision)


def gradients_read(bounds: TimeBounds, family: Family, zero: int) -> float:
    """Seconds in which the optimizer reads each gradient twice, which the bound leaves out."""
    dense, experts = bounds.own(family.slice, family.pipeline)
    peers = family.data * family.slice.sequence * family.slice.context if zero else 1
    updated = dense / peers + experts / max(1, peers / family.slice.expert)
    return updated * 2 * bounds.software.gradient_bytes / MEMORY_RATE


SLICES = [
    ALONE,
    ALONE._replace(tensor=2),
    ALONE._replace(tensor=4, sequence_parallel=True),
    ALONE._replace(sequence=2),
    ALONE._replace(context=4),
    ALONE._replace(micro_batch=2),
]


# ---------------------------------------------------------------- step time


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("slice", SLICES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_without_overlap_or_stages_the_bound_leaves_out_gradient_reads_alone(
    slice: Slice, recompute: Recompute, zero: int
) -> None:
    bounds, family = bounds_of(software=APART), Family(slice, ONE, recompute, 16, 3)
    expected = step_of(bounds, family, zero).seconds - gradients_read(bounds, family, zero)
    assert bounds.least_step(family, zero) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("expert", [1, 2, 8])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_experts_and_precision_are_part_of_the_bound(expert: int, zero: int, precision: str) -> None:
    bounds = bounds_of(SPARSE, replace(APART, gradient_bytes=4), precision=precision)
    family = Family(ALONE._replace(expert=expert), ONE, "selective", 8, 2)
    expected = step_of(bounds, family, zero).seconds - gradients_read(bounds, family, zero)
    assert bounds.least_step(family, zero) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", [DENSE, SPARSE])
@pytest.mark.parametrize("zero", range(4))
def test_with_overlap_the_last_bucket_is_left_out_where_it_is_hidden(shape: Shape, zero: int) -> None:
    """A sixteenth of each collective once a step."""
    bounds, family = bounds_of(shape), Family(ALONE, ONE, "none", 16, 3)
    step = step_of(bounds, family, zero)
    last = sum(each.seconds * each.times for each in step.exchanges if each.times == 1) / 16
    expected = step.seconds - gradients_read(bounds, family, zero) - last
    assert bounds.least_step(family, zero) == pytest.approx(expected, rel=1e-12)
    assert (last > 0) == (zero < 3)


@pytest.mark.parametrize("shape", [DENSE, SPARSE])
@pytest.mark.parametrize("zero", range(4))
def test_on_a_slow_network_all_that_exceeds_compute_is_in_the_bound(shape: Shape, zero: int) -> None:
    bounds, family = bounds_of(shape, fabric=SLOW), Family(ALONE, ONE, "none", 16, 3)
    step = step_of(bounds, family, zero)
    assert bounds.least_step(family, zero) == pytest.approx(step.seconds - gradients_read(bounds, family, zero), rel=1e-12)


@pytest.mark.parametrize(
    ("pipeline", "of_step", "of_pipeline"),
    [
        (Pipeline(4, "1f1b", 1), 0.990211, 0.959411),
        (Pipeline(4, "interleaved", 2), 0.978162, 0.944403),
        (Pipeline(4, "zb-h1", 1), 0.990026, 0.957140),
        (Pipeline(4, "zbv", 2), 0.939939, 0.896398),
        (Pipeline(4, "dualpipe", 1), 0.943773, 0.875813),
        (Pipeline(4, "dualpipev", 2), 0.931717, 0.888162),
    ],
)
def test_pipelines_are_bounded_closely(pipeline: Pipeline, of_step: float, of_pipeline: float) -> None:
    """Mean of the bounds over the exact step time, which may not get worse."""
    steps, pipelines = [], []
    for shape, software, zero in product((DENSE, SPARSE), (OVERLAPPED, APART), range(4)):
        bounds, family = bounds_of(shape, software), Family(ALONE._replace(tensor=2), pipeline, "none", 8, 8)
        seconds = step_of(bounds, family, zero).seconds
        steps.append(bounds.least_step(family, zero) / seconds)
        pipelines.append(bounds.least_pipeline(family) / seconds)
    assert max(steps) < 1 and max(pipelines) < 1
    assert statistics.mean(steps) >= of_step
    assert statistics.mean(pipelines) >= of_pipeline


@pytest.mark.parametrize("slice", SLICES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_work_of_one_micro_batch(slice: Slice, recompute: Recompute) -> None:
    """Its passes are all that one GPU without stages does, beside adding up gradients."""
    bounds = bounds_of(software=APART)
    family = Family(slice, ONE, recompute, 1, 1)
    times = step_of(bounds, family, 0).times
    added = 2 * 2 * sum(bounds.own(slice, ONE)) / MEMORY_RATE
    work, round_trip = bounds.least_work(slice, recompute, overlapping=False)
    assert work == pytest.approx(times.forward[0] + times.backward[0] + times.weight[0] - added)
    assert round_trip == pytest.approx(times.forward[0] + times.backward[0])
    units = bounds.units(slice, recompute)
    hidden = 8 * units.hidden[0] + units.hidden[2]
    covered, covered_trip = bounds.least_work(slice, recompute, overlapping=True)
    assert (work - covered, round_trip - covered_trip) == pytest.approx((2 * hidden, 2 * hidden))


def test_hidden_communication_is_all_but_its_cost() -> None:
    bounds = bounds_of(SPARSE, APART)
    slice = ALONE._replace(tensor=2, expert=2)
    times = step_of(bounds, Family(slice, Pipeline(2, "dualpipev", 2), "none", 2, 4), 0).times
    # Parts of two dense layers, a dense and a sparse one, two sparse ones and two sparse ones with the head.
    dense, sparse, head = bounds.units(slice, "none").hidden
    assert head == 0
    assert times.hidden == pytest.approx((2 * dense, dense + sparse, 2 * sparse, 2 * sparse))
    assert 0 < dense < sparse


@pytest.mark.parametrize(("data", "apart"), [(1, False), (3, False), (4, True), (5, True), (64, True)])
def test_sends_leave_a_domain_from_eight_gpus_on(data: int, apart: bool) -> None:
    bounds, slice = bounds_of(), ALONE._replace(tensor=2)
    family = Family(slice, Pipeline(2, "1f1b", 1), "none", data, 2)
    assert bounds.send(slice, data) == pytest.approx(step_of(bounds, family, 0).times.transfer[0])
    assert (bounds.send(slice, data) == bounds.send(slice, 64)) == apart


# ---------------------------------------------------------------- memory


def first_stage(shape: Shape, software: Software, family: Family, zero: int, offload: Any, precision: Any) -> StageMemory:
    layout = layout_of(family, precision, zero, offload)
    return plan_memory(shape, layout, 80e9, keeping_of(software), Worksheet(""), 4096).stages[0]


@pytest.mark.parametrize(("zero", "offload"), [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (1, "optimizer"), (3, "all")])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("shape", "slice"),
    [(DENSE, ALONE), (DENSE, ALONE._replace(sequence=2, context=3)), (SPARSE, ALONE), (SPARSE, ALONE._replace(expert=4))],
)
def test_first_stage_without_its_temporary_memory(shape: Shape, slice: Slice, zero: int, offload: Any, precision: Any) -> None:
    """The first stage's total less buffers, NCCL's gibibyte, the backward pass and its fragmentation."""
    bounds = MemoryBounds(shape, OVERLAPPED, 4096, precision)
    for pipeline in (Pipeline(2, "1f1b", 1), Pipeline(4, "interleaved", 2)):
        family = Family(slice, pipeline, "none", 8, 16)
        stage = first_stage(shape, OVERLAPPED, family, zero, offload, precision)
        state = stage.parameters + stage.gradients + stage.optimizer
        expected = state + 1.05 * stage.activations + 0.8 * GIB
        assert bounds.least(family, zero, offload) == pytest.approx(expected)
        assert stage.total == pytest.approx(expected + stage.buffers + GIB + 1.05 * stage.working)


def test_state_is_divided_by_tensor_parallelism_norms_included() -> None:
    bounds = MemoryBounds(DENSE, OVERLAPPED, 4096, "bf16")
    slice = ALONE._replace(tensor=4)
    family = Family(slice, Pipeline(2, "1f1b", 1), "full", 2, 4)
    stage = first_stage(DENSE, OVERLAPPED, family, 0, "none", "bf16")
    norms = 16 * 4 * 2 * 1024  # 16 bytes for each of four layers' norms, of which the bound counts a quarter
    expected = stage.total - norms * 3 / 4 - stage.buffers - GIB - 1.05 * stage.working
    assert bounds.least(family, 0, "none") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("zero", "offload", "precision", "width"),
    [
        (0, "none", "bf16", 16),
        (3, "none", "fp32", 16),
        (0, "optimizer", "bf16", 4),
        (1, "optimizer", "bf16", 4),
        (2, "optimizer", "bf16", 2),
        (3, "optimizer", "fp32", 4),
        (3, "all", "bf16", 0),
    ],
)
def test_mean_state_of_a_gpu(zero: int, offload: Any, precision: Any, width: int) -> None:
    assert MemoryBounds(DENSE, OVERLAPPED, 4096, precision).least_state(zero, offload, 7) == width * DENSE.parameters() / 7


def test_activations_of_both_kinds_of_layers() -> None:
    slice = ALONE._replace(tensor=2, micro_batch=3)
    layout = layout_of(Family(slice, ONE, "full", 1, 1), "bf16")
    keeping = keeping_of(OVERLAPPED)
    dense, sparse = (layer_parts(SPARSE, layout, keeping, kind, 2048).total for kind in (False, True))
    assert MemoryBounds(SPARSE, OVERLAPPED, 2048, "bf16").layer_activations(slice, "full") == (dense, sparse)
    assert MemoryBounds(DENSE, OVERLAPPED, 2048, "bf16").layer_activations(slice, "full") == (dense, 0)
    assert SPARSE.experts
    all_sparse = replace(SPARSE, experts=replace(SPARSE.experts, dense_layers=0))
    assert MemoryBounds(all_sparse, OVERLAPPED, 2048, "bf16").layer_activations(slice, "none")[0] == 0
