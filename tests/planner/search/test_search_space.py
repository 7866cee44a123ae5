"""Search space of layouts, against generate-and-test over plain loops, and worked divisions of a batch."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.planner.catalogue.shape import Experts, Shape
from strata.planner.layout import Layout
from strata.planner.search import space
from strata.planner.search.pareto import front
from strata.planner.search.space import (
    ANYTHING,
    STRATA,
    Batch,
    Family,
    Limits,
    Pipeline,
    Slice,
    divide_batch,
    layout_of,
    pipelines,
)

SHAPE = Shape("small", layers=12, hidden=96, heads=24, kv_heads=4, head_dim=4, ffn=160, vocab=1000, context=8192)
SPARSE = Shape("mixture", 12, 96, 24, 4, 4, 160, 1000, 8192, experts=Experts(count=6, top_k=2, ffn=36))
ALONE = Slice(tensor=1, sequence_parallel=False, sequence=1, context=1, micro_batch=1, expert=1)
POWERS = (1, 2, 4, 8, 16, 32, 64, 128)


def test_gpus_and_steps_of_a_slice() -> None:
    one = Slice(tensor=2, sequence_parallel=True, sequence=3, context=5, micro_batch=7, expert=12)
    assert one.gpus == 30
    assert one.step == 12 // 3  # 15 GPUs share a sequence, and gcd(12, 15) = 3
    assert one._replace(expert=1).step == 1


def test_layout_of_a_family() -> None:
    family = Family(Slice(2, True, 3, 5, 7, 11), Pipeline(13, "interleaved", 4), "selective", 17, 19)
    assert layout_of(family, "fp8", 2, "optimizer") == Layout(
        data=17,
        tensor=2,
        pipeline=13,
        sequence=3,
        context=5,
        expert=11,
        schedule="interleaved",
        interleave=4,
        zero=2,
        micro_batch=7,
        batch=17 * 7 * 19,
        recompute="selective",
        offload="optimizer",
        sequence_parallel=True,
        precision="fp8",
    )
    assert (layout_of(family, "bf16").zero, layout_of(family, "bf16").offload) == (0, "none")


def divides_heads(tensor: int) -> bool:
    return 24 % tensor == 0 and (4 % tensor == 0 or tensor % 4 == 0)


@pytest.mark.parametrize(
    ("shape", "sequence", "domain", "gpus", "batch", "limits"),
    [
        (SHAPE, 4096, 8, 16, 20, ANYTHING),
        (SHAPE, 4096, 8, 3, 4, ANYTHING),
        (SHAPE, 8192, 4, 64, 8, STRATA),
        (SHAPE, 3072, 8, 16, 64, ANYTHING),
        (SHAPE, 1000, 8, 8, 40, ANYTHING),
        (SHAPE, 65536, 2, 8, 2, Limits(sequence_parallel=(True,))),
        (SPARSE, 4096, 8, 12, 3, ANYTHING),
    ],
)
def test_slices(shape: Shape, sequence: int, domain: int, gpus: int, batch: int, limits: Limits) -> None:
    expected = set()
    experts = (1, 2, 3, 6) if shape.experts else (1,)
    for tensor, parallel, ulysses, ring, size, expert in product(POWERS, (False, True), POWERS, POWERS, POWERS, experts):
        sharers = ulysses * ring
        if tensor > min(domain, gpus) or not divides_heads(tensor) or tensor * max(expert, sharers) > gpus:
            continue
        if parallel not in limits.sequence_parallel if tensor > 1 else parallel:
            continue
        if sharers == 1:
            if size > batch or (size > 1 and size * sequence > 32768):
                continue
        elif (
            (ulysses > 1 and ring > 1)
            or size > 1
            or sequence % sharers
            or sequence / sharers < 1024
            or (24 // tensor) % ulysses
            or (ring > 1 and not limits.rings)
        ):
            continue
        expected.add(Slice(tensor, parallel, ulysses, ring, size, expert))
    found = list(space.slices(shape, sequence, domain, gpus, batch, limits))
    assert len(found) == len(set(found))
    assert set(found) == expected


@pytest.mark.parametrize(("layers", "limits"), [(12, ANYTHING), (12, STRATA), (1, ANYTHING), (7, ANYTHING), (150, ANYTHING)])
def test_pipelines(layers: int, limits: Limits) -> None:
    """Stages are a power of two or a divisor of the layers, up to 64. An interleaved stage has up to eight chunks."""
    expected = {Pipeline(1, "1f1b", 1)}
    for stages, schedule, chunks in product(range(2, 65), limits.schedules, range(1, 13)):
        per_stage = layers // stages
        match schedule:
            case "interleaved":
                fits = 2 <= chunks <= 8 and (chunks in (2, 4, 8) or per_stage % chunks == 0)
            case "zbv" | "dualpipev":
                fits = chunks == 2
            case "dualpipe":
                fits = chunks == 1 and stages % 2 == 0
            case _:
                fits = chunks == 1
        if fits and stages * chunks <= layers and (stages in POWERS or layers % stages == 0):
            expected.add(Pipeline(stages, schedule, chunks))
    found = pipelines(layers, limits)
    assert len(found) == len(set(found)) and set(found) == expected
    assert found[0] == Pipeline(1, "1f1b", 1)
    assert [each.stages for each in found] == sorted(each.stages for each in found)


@settings(deadline=None, max_examples=50)
@given(
    batch=st.integers(1, 96),
    gpus=st.integers(1, 40),
    tensor=st.sampled_from((1, 2)),
    context=st.sampled_from((1, 2)),
    micro_batch=st.sampled_from((1, 2, 4)),
    expert=st.sampled_from((1, 2, 4)),
    pipeline=st.sampled_from(
        (Pipeline(1, "1f1b", 1), Pipeline(2, "1f1b", 1), Pipeline(2, "interleaved", 2), Pipeline(2, "dualpipev", 2))
    ),
)
def test_an_exact_batch_has_the_largest_data_parallel_size_that_divides_it(
    batch: int, gpus: int, tensor: int, context: int, micro_batch: int, expert: int, pipeline: Pipeline
) -> None:
    slice = Slice(tensor, False, 1, context, micro_batch, expert)
    expected = None
    for data in range(1, gpus // (tensor * context * pipeline.stages) + 1):
        count, rest = divmod(batch, data * micro_batch)
        if rest or data * context % expert:
            continue
        if (pipeline.schedule == "interleaved" and count % 2) or (pipeline.schedule == "dualpipev" and count < 4):
            continue
        expected = data, count
    assert divide_batch(Batch(batch), slice, pipeline, gpus) == expected


ONE = Pipeline(1, "1f1b", 1)


@pytest.mark.parametrize(
    ("batch", "slice", "pipeline", "gpus", "expected"),
    [
        # 96 sequences over ten ranks: 10 micro-batches are 100 sequences, 4% more
        (Batch(96, 0.05), ALONE, ONE, 10, (10, 10)),
        # 91.2 to 100.8 sequences on seven ranks: 14 micro-batches are 98
        (Batch(96, 0.05), ALONE, ONE, 7, (7, 14)),
        # a multiple of four ranks
        (Batch(96, 0.05), ALONE._replace(expert=4), ONE, 10, (8, 12)),
        (Batch(96, 0.05), ALONE._replace(expert=4), ONE, 3, None),
        (Batch(96, 0.05), ALONE._replace(expert=4), ONE, 4, (4, 23)),
        # a quarter less is allowed, and no more
        (Batch(8, 0.25), ALONE, ONE, 3, (3, 2)),
        (Batch(8, 0.2), ALONE, ONE, 3, (3, 3)),
        # two sequences in a micro-batch and two stages
        (Batch(96, 0.05), ALONE._replace(micro_batch=2), Pipeline(2, "1f1b", 1), 20, (10, 5)),
        (Batch(96, 0.05), ALONE._replace(tensor=2), Pipeline(3, "1f1b", 1), 20, (3, 31)),
        # fewer sequences than ranks
        (Batch(4, 0.05), ALONE, ONE, 100, (4, 1)),
        (Batch(8, 0.05), ALONE._replace(expert=4), ONE, 100, (8, 1)),
        (Batch(96, 0.05), ALONE, Pipeline(4, "interleaved", 2), 40, (8, 12)),
    ],
)
def test_a_batch_in_tokens_may_be_missed(
    batch: Batch, slice: Slice, pipeline: Pipeline, gpus: int, expected: tuple[int, int] | None
) -> None:
    assert divide_batch(batch, slice, pipeline, gpus) == expected


def test_micro_batch_counts_to_try() -> None:
    loose = Batch(96, 0.05)
    assert space._numbers(loose, 1, 10, ONE) == tuple(range(10, 34))  # 24 of them
    assert space._numbers(loose, 1, 10, Pipeline(4, "interleaved", 2)) == (12, 16, 20, 24, 28, 32, 36, 40)
    assert space._numbers(loose, 1, 10**6, ONE)[0] == 1
    assert space._numbers(Batch(12), 1, 5, ONE) == (3, 4, 6, 12)
    assert space._numbers(Batch(12), 5, 5, ONE) == ()
    assert space._numbers(Batch(12), 2, 6, ONE) == (1, 2, 3, 6)


def test_divisors_and_powers() -> None:
    assert space._divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert space._divisors(1) == (1,)
    assert space._divisors(7) == (1, 7)
    assert space._powers(9) == (1, 2, 4, 8)
    assert space._powers(8) == (1, 2, 4, 8)
    assert space._powers(7) == (1, 2, 4)
    assert space._powers(0) == space._powers(-3) == ()


def test_limits_of_strata_train() -> None:
    assert STRATA.schedules == ("1f1b", "dualpipev") and not STRATA.rings and STRATA.refuses
    assert STRATA.sequence_parallel == (False,)
    assert ANYTHING.zeros == (0, 1, 2, 3) and ANYTHING.recomputes == ("none", "selective", "full")
    assert ANYTHING.rings and ANYTHING.refuses is None and ANYTHING.offloads == ("none",)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_pareto_front_is_what_no_other_choice_beats(points: list[tuple[int, int]]) -> None:
    expected = {one for one in points if not any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in points)}
    assert front(points, lambda point: point) == sorted(expected)
