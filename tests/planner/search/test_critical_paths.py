"""Critical-path candidates: never longer than the simulated pipeline, mostly as long, and worked by hand for two stages."""

import statistics
from dataclasses import replace
from operator import mul

import pytest

from strata.planner.catalogue.shape import Experts, Shape
from strata.planner.layout import Schedule
from strata.planner.pipeline.schedules import orders, refusal
from strata.planner.pipeline.simulate import Times, quick_total
from strata.planner.search.critical_paths import CriticalPath, critical_paths, partition
from strata.planner.search.space import Pipeline
from strata.planner.step.stages import layers_of

DENSE = Shape("dense", 16, 64, 4, 4, 16, 64, 100, 128)
SPARSE = Shape("sparse", 17, 64, 4, 4, 16, 64, 100, 128, experts=Experts(4, 2, 8, dense_layers=3))
# Seconds of a dense layer, a sparse layer and the head: forward, input gradient, weight gradient, overlapped communication.
UNITS = {
    "even": ((1.0, 2.5, 0.7), (1.1, 2.7, 0.8), (0.9, 2.2, 0.6), (0.1, 0.3, 0.0)),
    "large head": ((1.0, 2.5, 7.0), (1.1, 2.7, 8.0), (0.9, 2.2, 6.0), (0.1, 0.3, 0.0)),
    "slow weights": ((1.0, 2.5, 0.1), (1.1, 2.7, 0.1), (3.0, 6.0, 0.1), (0.1, 0.3, 0.0)),
    "slow inputs": ((1.0, 2.5, 0.1), (3.1, 7.7, 0.1), (0.5, 1.0, 0.1), (0.1, 0.3, 0.0)),
}
UNEVEN = {"slow dense layers": ((0.3, 0.0104, 0.196), (2.61, 0.0203, 0.04), (3.84, 0.0933, 0.354), (0.0, 0.0, 0.0))}
CHUNKS: dict[Schedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "dualpipe": 1, "dualpipev": 2}


def bound_and_total(shape: Shape, pipeline: Pipeline, micro_batches: int, unit: str, transfer: float) -> tuple[float, float]:
    """The longest candidate, and the simulated pipeline of the same layers. Adding up gradients takes 0.05 s a part."""
    counts = layers_of(shape, pipeline.stages * pipeline.chunks)
    contents = [(*count, float(part == len(counts) - 1)) for part, count in enumerate(counts)]
    forward, backward, weight, hidden = (
        tuple(sum(map(mul, seconds, content)) for content in contents) for seconds in (UNITS | UNEVEN)[unit]
    )
    overlaps = pipeline.schedule.startswith("dualpipe")
    added = tuple(seconds + 0.05 for seconds in weight)
    times = Times(forward, backward, added, (transfer,) * (len(counts) - 1), hidden=hidden if overlaps else ())
    total = quick_total(pipeline.schedule, pipeline.stages, micro_batches, pipeline.chunks, times)
    each = [second for seconds in (UNITS | UNEVEN)[unit] for second in seconds] + [0.05, transfer]
    return max(sum(map(mul, path.passes, each)) for path in critical_paths(shape, pipeline, micro_batches)), total


@pytest.mark.parametrize(
    ("schedule", "tight", "mean"),
    [
        ("gpipe", 114, 0.979378),
        ("1f1b", 106, 0.986313),
        ("interleaved", 40, 0.995741),
        ("zb-h1", 94, 0.981480),
        ("zbv", 54, 0.978416),
        ("dualpipe", 0, 0.978599),
        ("dualpipev", 20, 0.966314),
    ],
)
def test_candidates_are_lower_bounds_and_mostly_tight(schedule: Schedule, tight: int, mean: float) -> None:
    """`tight`: cases in which the bound is the simulated time; `mean`: the bound over that time. Neither may get worse."""
    ratios = []
    for shape in (DENSE, SPARSE):
        for stages, micro_batches in ((2, 2), (2, 3), (2, 5), (2, 8), (4, 2), (4, 4), (4, 8), (4, 9), (4, 12)):
            pipeline = Pipeline(stages, schedule, CHUNKS[schedule])
            if refusal(schedule, stages, micro_batches, CHUNKS[schedule]):
                continue
            for unit in UNITS:
                for transfer in (0.02, 0.4):
                    bound, total = bound_and_total(shape, pipeline, micro_batches, unit, transfer)
                    assert bound <= total * (1 + 1e-9), (pipeline, micro_batches, unit, transfer)
                    ratios.append(bound / total)
    assert sum(ratio > 1 - 1e-9 for ratio in ratios) >= tight
    assert statistics.mean(ratios) >= mean


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches"),
    [
        ("dualpipev", 2, 7),
        ("dualpipev", 4, 8),
        ("dualpipev", 4, 13),
        ("dualpipe", 2, 6),
        ("dualpipe", 4, 14),
        ("dualpipe", 8, 16),
    ],
)
def test_overlapped_passes_are_the_joined_operations(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """Each pair hides the communication of a forward and of a backward pass of one of a stage's two parts."""
    pipeline = Pipeline(stages, schedule, CHUNKS[schedule])
    order = orders(schedule, stages, micro_batches, CHUNKS[schedule])
    for stage in partition(DENSE, pipeline).stages:
        joined = sum(operation.joined for operation in order[stage.depth])
        path = next(each for each in critical_paths(DENSE, pipeline, micro_batches) if each.own == stage.own)
        assert path.passes[9:12] == (-joined / 2 * stage.own[0], 0, -joined / 2 * stage.own[2])


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches"),
    [
        ("zb-h1", 4, 2),
        ("zb-h1", 4, 9),
        ("zb-h1", 2, 3),
        *(("zbv", 4, m) for m in (1, 3, 4, 5, 6, 7, 8, 12)),
        ("zbv", 2, 2),
        ("zbv", 8, 11),
    ],
)
def test_weight_gradients_that_are_left_after_the_last_input_gradient(
    schedule: Schedule, stages: int, micro_batches: int
) -> None:
    pipeline = Pipeline(stages, schedule, CHUNKS[schedule])
    order = orders(schedule, stages, micro_batches, CHUNKS[schedule])
    found = critical_paths(SPARSE, pipeline, micro_batches)
    for stage in partition(SPARSE, pipeline).stages:
        kinds = [operation.kind for operation in order[stage.depth]]
        last = max(position for position, kind in enumerate(kinds) if "B" in kind)
        left = sum("W" in kind for kind in kinds[last:])
        work, after = (path for path in found if path.own == stage.own)
        assert after.passes[12] - work.passes[12] == 1 - left


def test_a_stage_of_zbv_may_have_several_weight_gradients_left() -> None:
    """Dense layers that take far longer than the others, and fewer than 2 x stages - 1 micro-batches."""
    uneven = replace(SPARSE, layers=13, experts=Experts(4, 2, 8, dense_layers=5))
    bound, total = bound_and_total(uneven, Pipeline(5, "zbv", 2), 6, "slow dense layers", 0.0)
    assert bound <= total * (1 + 1e-9)


def passes(**counts: tuple[float, float, float] | float) -> tuple[float, ...]:
    none = (0.0, 0.0, 0.0)
    kinds = [counts.get(name, none) for name in ("forward", "backward", "weight", "hidden")]
    return (*(count for kind in kinds for count in kind), counts.get("parts", 0), counts.get("transfers", 0))  # type: ignore[union-attr, return-value]


def test_paths_of_two_stages() -> None:
    """Eight layers each; three micro-batches."""
    first, last, round_trip = critical_paths(DENSE, Pipeline(2, "1f1b", 1), 3)
    assert first == CriticalPath(passes(forward=(24, 0, 0), backward=(24, 0, 0), weight=(24, 0, 0), parts=3), (8, 0, 0), 3)
    assert last == CriticalPath(
        passes(forward=(32, 0, 3), backward=(32, 0, 3), weight=(32, 0, 3), parts=4, transfers=2), (8, 0, 1), 3
    )
    assert round_trip == CriticalPath(
        passes(forward=(16, 0, 1), backward=(16, 0, 1), weight=(8, 0, 0), parts=1, transfers=2), None, 0
    )


def test_one_stage_has_one_path() -> None:
    (only,) = critical_paths(SPARSE, Pipeline(1, "1f1b", 1), 5)
    assert only == CriticalPath(passes(forward=(15, 70, 5), backward=(15, 70, 5), weight=(15, 70, 5), parts=5), (3, 14, 1), 5)


def test_partition_of_a_model() -> None:
    """Seventeen layers in four parts: 4, 5, 4 and 4, of which three layers are dense."""
    found = partition(SPARSE, Pipeline(4, "1f1b", 1))
    assert found.counts == [(3, 1), (0, 5), (0, 4), (0, 4)] and found.parts == 4
    assert (found.first, found.middle) == ((3, 1, 0), (0, 4, 0))
    assert [(stage.own, stage.before, stage.depth, stage.parts) for stage in found.stages] == [
        ((3, 1, 0), (0, 0, 0), 0, 1),
        ((0, 5, 0), (3, 1, 0), 1, 1),
        ((0, 4, 0), (3, 6, 0), 2, 1),
        ((0, 4, 1), (3, 10, 0), 3, 1),
    ]
    v = partition(SPARSE, Pipeline(2, "zbv", 2))
    assert [(stage.own, stage.widest, stage.parts) for stage in v.stages] == [
        ((3, 5, 1), (3, 4, 1), 2),
        ((0, 9, 0), (0, 5, 0), 2),
    ]


def test_stages_with_equal_content_are_represented_by_the_farthest() -> None:
    found = partition(DENSE, Pipeline(4, "1f1b", 1))
    assert [(stage.own, stage.depth) for stage in found.stages] == [((4, 0, 0), 2), ((4, 0, 1), 3)]


def test_half_of_a_dualpipe_holds_the_same() -> None:
    assert [stage.depth for stage in partition(SPARSE, Pipeline(4, "dualpipe", 1)).stages] == [0, 1]
