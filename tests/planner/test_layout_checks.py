"""Checks of layouts on both sides of every rule, and the placement of the ranks of a collective."""

from dataclasses import replace

import pytest

from strata.planner import checks
from strata.planner.catalogue.shape import Experts, Shape
from strata.planner.cli.studies import place_of
from strata.planner.collectives.patterns import Place
from strata.planner.layout import Layout
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware

DENSE = Shape("dense", layers=12, hidden=768, heads=24, kv_heads=6, head_dim=32, ffn=3072, vocab=1000, context=4096)
SPARSE = replace(DENSE, name="sparse", experts=Experts(count=12, top_k=2, ffn=512))
LEARNED = replace(DENSE, name="learned", positions=True)
PRIME = replace(DENSE, name="prime", heads=7, kv_heads=7)
H100 = hardware.gpu("h100")


def verdict(layout: Layout, shape: Shape = DENSE, sequence: int = 4096) -> tuple[str, str] | None:
    """Cause and fix of a refused layout; None for an accepted one."""
    try:
        checks.check(shape, layout, sequence, H100)
    except UserError as error:
        return error.cause, error.fix
    return None


ACCEPTED: list[tuple[Layout, Shape, int]] = [
    (Layout(), DENSE, 4096),
    (Layout(tensor=2), DENSE, 4096),
    (Layout(tensor=12), DENSE, 4096),  # 6 key/value heads, each on two GPUs
    (Layout(tensor=24), DENSE, 4096),
    (Layout(tensor=2, sequence=12), DENSE, 4080),
    (Layout(context=16), DENSE, 4096),
    (Layout(pipeline=12, batch=12), DENSE, 4096),
    (Layout(pipeline=3, batch=6, schedule="interleaved", interleave=4), DENSE, 4096),
    (Layout(), LEARNED, 4096),
    (Layout(), DENSE, 100_000),
    (Layout(data=12, expert=12, batch=12), SPARSE, 4096),
    (Layout(data=2, sequence=2, context=3, expert=6, batch=2), SPARSE, 4080),
    (Layout(data=4, micro_batch=3, batch=24), DENSE, 4096),
    (Layout(tensor=2, sequence_parallel=True), DENSE, 4096),
    (Layout(schedule="gpipe"), DENSE, 4096),
]


@pytest.mark.parametrize(("layout", "shape", "sequence"), ACCEPTED)
def test_possible_layouts_are_accepted(layout: Layout, shape: Shape, sequence: int) -> None:
    assert verdict(layout, shape, sequence) is None


REFUSED: list[tuple[Layout, Shape, int, str, str]] = [
    (Layout(tensor=5), DENSE, 4096, "--tensor 5 does not divide the 24 heads of dense.", "--tensor 4 works."),
    (Layout(tensor=5), PRIME, 4096, "--tensor 5 does not divide the 7 heads of prime.", "--tensor 1 works."),
    (Layout(tensor=48), DENSE, 4096, "--tensor 48 does not divide the 24 heads of dense.", "--tensor 24 works."),
    (
        Layout(tensor=4),
        DENSE,
        4096,
        "--tensor 4 and the 6 key/value heads of dense do not divide each other.",
        "--tensor 3 works.",
    ),
    (
        Layout(tensor=8),
        DENSE,
        4096,
        "--tensor 8 and the 6 key/value heads of dense do not divide each other.",
        "--tensor 6 works.",
    ),
    (
        Layout(tensor=2, sequence=5),
        DENSE,
        4000,
        "--sequence 5 does not divide the 12 heads that --tensor 2 leaves a GPU.",
        "--sequence 4 works; --context has no such limit.",
    ),
    (
        Layout(sequence_parallel=True),
        DENSE,
        4096,
        "--sequence-parallel splits what tensor-parallel GPUs share, and --tensor is 1.",
        "Raise --tensor.",
    ),
    (Layout(sequence=2, context=3), DENSE, 4096, "--seq 4096 is not a multiple of sequence x context = 6.", "--seq 4098 works."),
    (Layout(sequence=2, context=3), DENSE, 2, "--seq 2 is not a multiple of sequence x context = 6.", "--seq 6 works."),
    (Layout(), LEARNED, 4097, "--seq 4097 is more than the 4096 positions that learned has learned.", "--seq 4096 works."),
    (
        Layout(pipeline=13, batch=13),
        DENSE,
        4096,
        "12 layers cannot be cut into 13 parts (pipeline x chunks of a stage).",
        "Lower --pipeline or --interleave.",
    ),
    (Layout(data=2, expert=2, batch=2), DENSE, 4096, "dense has no experts to spread over 2 GPUs.", "Leave --expert out."),
    (
        Layout(data=10, expert=5, batch=10),
        SPARSE,
        4096,
        "--expert 5 does not divide the 12 experts of sparse.",
        "--expert 4 works.",
    ),
    (
        Layout(data=2, sequence=2, context=2, expert=6, batch=2),
        SPARSE,
        4096,
        "--expert 6 does not divide the 8 GPUs that hold the same layers (data x sequence x context).",
        "--expert 4 works.",
    ),
    (
        Layout(data=4, micro_batch=3, batch=20),
        DENSE,
        4096,
        "--batch 20 is not a multiple of data x micro-batch = 12 sequences.",
        "--batch 24 works.",
    ),
    (
        Layout(data=4, micro_batch=3, batch=5),
        DENSE,
        4096,
        "--batch 5 is not a multiple of data x micro-batch = 12 sequences.",
        "--batch 12 works.",
    ),
    (
        Layout(pipeline=2, batch=3, schedule="interleaved", interleave=2),
        DENSE,
        4096,
        "schedule interleaved needs a multiple of stages=2 micro-batches, not micro_batches=3",
        "micro_batches=4 works. Stages are --pipeline, micro-batches --batch / (data x micro-batch).",
    ),
    (
        Layout(schedule="interleaved", interleave=2),
        DENSE,
        4096,
        "There is nothing to interleave in one stage.",
        "Give --pipeline 2 or more, or leave --interleave out.",
    ),
    (
        Layout(data=10**6, tensor=12, batch=10**6),
        DENSE,
        4096,
        "data x tensor x pipeline x sequence x context = 12,000,000 GPUs are more than a plan can be made for.",
        "Lower one of them: 10,000,000 GPUs are the most.",
    ),
]


@pytest.mark.parametrize(("layout", "shape", "sequence", "cause", "fix"), REFUSED)
def test_impossible_layouts_are_refused_with_the_nearest(
    layout: Layout, shape: Shape, sequence: int, cause: str, fix: str
) -> None:
    assert verdict(layout, shape, sequence) == (cause, fix)


def test_refused_values_of_a_recipe_name_their_option() -> None:
    assert verdict(Layout(micro_batch=0)) == (
        "--micro-batch 0 is out of range.",
        "Give --micro-batch a number in its range: 1 to 1,000,000.",
    )
    assert "--zero 4" in (verdict(Layout(zero=4)) or ("",))[0]
    assert "--seq 0" in (verdict(Layout(), sequence=0) or ("",))[0]


def test_precisions_that_a_gpu_lacks_are_refused() -> None:
    with pytest.raises(UserError, match=r"a100-80gb does not compute in fp8") as error:
        checks.check(DENSE, Layout(precision="fp8"), 4096, hardware.gpu("a100"))
    assert "bf16" in error.value.fix


@pytest.mark.parametrize(("gpus", "data"), [(6, 1), (12, 2), (600, 100)])
def test_data_parallel_ranks_of_a_number_of_gpus(gpus: int, data: int) -> None:
    assert checks.data_of(gpus, Layout(tensor=3, pipeline=2)) == data
    assert checks.data_of(gpus * 35, Layout(tensor=3, pipeline=2, sequence=5, context=7)) == data


@pytest.mark.parametrize(("gpus", "nearest"), [(1, 6), (0, 6), (8, 6), (10, 12), (-6, 6)])
def test_other_numbers_of_gpus_are_refused_with_the_nearest(gpus: int, nearest: int) -> None:
    with pytest.raises(UserError, match=f"{gpus} GPUs are not a multiple of .* = 6") as error:
        checks.data_of(gpus, Layout(tensor=3, pipeline=2))
    assert error.value.fix == f"--gpus {nearest} works."


def test_sizes_of_a_layout() -> None:
    layout = Layout(data=2, tensor=3, pipeline=5, sequence=7, context=11, micro_batch=2, batch=36)
    assert (layout.gpus, layout.micro_batches) == (2310, 9)


@pytest.mark.parametrize(
    ("ranks", "inside", "place"),
    [
        (None, None, Place(8, 1)),
        (4, None, Place(4, 1)),
        (8, None, Place(8, 1)),
        (16, None, Place(8, 2)),
        (12, 3, Place(3, 4)),
        (None, 2, Place(2, 4)),
    ],
)
def test_ranks_fill_the_domains_of_the_gpu(ranks: int | None, inside: int | None, place: Place) -> None:
    assert place_of(ranks, inside, H100) == place
    assert place.ranks == place.inside * place.domains


def test_ranks_that_do_not_fill_their_domains_are_refused() -> None:
    with pytest.raises(UserError, match="--ranks 12 cannot be divided into domains of 8"):
        place_of(12, None, H100)
