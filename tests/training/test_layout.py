from itertools import count, product

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import ParallelSection, Recipe
from strata.training.layout import Place, accumulation, distance, place, require_workable, workable_layouts

MOE = ("model.moe.experts=4",)
NF4 = "train.lora.base=nf4"


def recipe(*overrides: str) -> Recipe:
    shape = ("model.heads=8", "model.kv_heads=4", "model.layers=4", "train.batch=16", "train.micro_batch=1")
    return recipe_file.load("laptop", [*shape, "parallel.workers=8", *overrides])


def require(chosen: Recipe) -> None:
    require_workable(chosen.model, chosen.train, chosen.parallel)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.zero=3",),
        ("parallel.tensor=4", "parallel.zero=2"),
        ("parallel.pipeline=2", "parallel.zero=1"),
        ("parallel.pipeline=2", "parallel.tensor=2", "parallel.schedule=dualpipev"),
        ("parallel.sequence=4", "parallel.zero=3"),
        (*MOE, "parallel.expert=4", "parallel.zero=2"),
        ("parallel.zero=3", "parallel.offload=all"),
        (NF4, "parallel.zero=2", "parallel.sequence=2"),
        (NF4, "parallel.pipeline=2", "parallel.zero=1"),
        ("train.lora.dora=true", "parallel.zero=3"),
        ("train.lora.dora=true", "parallel.tensor=2", "parallel.pipeline=2"),
    ],
)
def test_supported_layouts_are_accepted(overrides: tuple[str, ...]) -> None:
    require(recipe(*overrides))


@pytest.mark.parametrize("name", recipe_file.names())
def test_bundled_recipes_are_accepted(name: str) -> None:
    require(recipe_file.load(name))


@pytest.mark.parametrize(
    ("overrides", "problem", "nearest"),
    [
        (("parallel.pipeline=2", "parallel.zero=3"), "works with ZeRO 0 and 1", "parallel.zero=1"),
        (("parallel.pipeline=2", "parallel.sequence=2"), "neither sequence nor expert", "parallel.sequence=1"),
        (("parallel.pipeline=8", "parallel.schedule=1f1b"), "model.layers=4 cannot be divided into the 8", "parallel.pipeline=4"),
        (("parallel.schedule=dualpipev",), "parallel.pipeline is 1", "parallel.schedule=1f1b"),
        (
            ("parallel.pipeline=2", "parallel.schedule=dualpipev", "train.batch=8"),
            "needs 4 micro-batches",
            "parallel.schedule=1f1b",
        ),
        (("parallel.tensor=8",), "must divide model.heads=8 and model.kv_heads=4", "parallel.tensor=4"),
        (("parallel.sequence=8",), "must divide model.heads=8 and model.kv_heads=4", "parallel.sequence=4"),
        (("parallel.tensor=2", "parallel.sequence=2"), "tensor and sequence", "parallel.sequence=1"),
        (("parallel.expert=2",), "the model has none", "parallel.expert=1"),
        (("parallel.tensor=2", "parallel.zero=0", "train.precision=bf16"), "norm of its own", "parallel.zero=1"),
        ((*MOE, "parallel.expert=8"), "must divide model.moe.experts=4", "parallel.expert=4"),
        ((*MOE, "parallel.expert=2", "parallel.tensor=2"), "data parallelism only", "parallel.expert=1"),
        ((*MOE, "parallel.sequence=2"), "balances whole sequences", "parallel.sequence=1"),
        (("parallel.offload=optimizer", "parallel.zero=0"), "parallel.zero is 0", "parallel.zero=1"),
        (("parallel.offload=all", "parallel.zero=1"), "only parallel.zero=3", "parallel.offload=optimizer"),
        (("parallel.offload=optimizer", "parallel.pipeline=2"), "does not offload", "parallel.offload=none"),
        ((NF4, "parallel.tensor=2"), "parallel.tensor=2 and parallel.expert=1 cannot divide", "parallel.tensor=1"),
        ((NF4, "parallel.zero=3"), "which parallel.zero=3 would have to partition", "parallel.zero=2"),
        ((*MOE, NF4, "parallel.expert=2"), "parallel.expert=2 cannot divide", "parallel.expert=1"),
        ((*MOE, "train.lora.dora=true", "parallel.expert=2"), "has no magnitudes", "parallel.expert=1"),
        # tensor=4 alone would leave 2 data-parallel workers for a batch of one micro-batch
        (("parallel.tensor=8", "train.batch=2", "train.micro_batch=2"), "kv_heads=4", "parallel.tensor=4 parallel.pipeline=2"),
    ],
)
def test_unsupported_layouts_are_refused_with_the_nearest_supported(
    overrides: tuple[str, ...], problem: str, nearest: str
) -> None:
    with pytest.raises(UserError) as raised:
        require(recipe(*overrides))
    assert problem in raised.value.cause and raised.value.fix == f"The nearest layout that works: {nearest}"
    fixes = raised.value.fix.split(": ")[1].split()
    require(recipe(*overrides, *fixes))


def test_recipe_without_any_supported_layout_is_refused() -> None:
    with pytest.raises(UserError, match="no layout of these works"):
        require(recipe("train.batch=1", "parallel.workers=7", "parallel.tensor=7"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("parallel.tensor=3",), "must be a multiple of tensor x pipeline x sequence"),
        (("parallel.expert=3",), "must divide the 8 data-parallel workers"),
        (("parallel.tensor=2", "train.batch=6"), "must be a multiple of data-parallel workers"),
    ],
)
def test_indivisible_sizes_are_refused_by_the_recipe(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe(*overrides)


# stages, data-parallel workers, sequence-parallel workers, tensor-parallel workers
GRIDS = [(1, 1, 1, 1), (2, 2, 2, 2), (1, 4, 1, 2), (3, 2, 1, 5), (2, 3, 1, 4), (1, 3, 2, 1), (4, 1, 1, 1), (2, 5, 3, 2)]


@pytest.mark.parametrize("grid", GRIDS)
def test_ranks_fill_the_grid_from_its_last_dimension(grid: tuple[int, ...]) -> None:
    """Tensor-parallel ranks are neighbours, then sequence-parallel and data-parallel ranks; stages are farthest apart."""
    stages, data, sequence, tensor = grid
    parallel = ParallelSection(workers=stages * data * sequence * tensor, tensor=tensor, pipeline=stages, sequence=sequence)
    ranks = count()
    for at in product(range(stages), range(data), range(sequence), range(tensor)):
        assert place(next(ranks), parallel) == Place(*at)
    assert next(ranks) == parallel.workers


@pytest.mark.parametrize(
    ("batch", "micro_batch", "workers", "tensor", "micro_batches"),
    [(24, 2, 3, 1, 4), (24, 2, 6, 2, 4), (24, 4, 6, 1, 1), (24, 1, 1, 1, 24)],
)
def test_batch_is_accumulated_in_micro_batches(
    batch: int, micro_batch: int, workers: int, tensor: int, micro_batches: int
) -> None:
    shape = (f"train.batch={batch}", f"train.micro_batch={micro_batch}", f"parallel.workers={workers}")
    chosen = recipe(*shape, f"parallel.tensor={tensor}")
    found = accumulation(chosen.train, chosen.parallel)
    assert found == micro_batches and isinstance(found, int)


BASE = {"workers": 128, "zero": 1, "tensor": 4, "pipeline": 2, "sequence": 2, "expert": 2, "offload": "optimizer"}


@pytest.mark.parametrize(
    ("change", "far"),
    [
        ({}, 0),
        ({"zero": 3}, 2),
        ({"zero": 0}, 1),
        ({"tensor": 2}, 10),
        ({"tensor": 8}, 10),
        ({"tensor": 1}, 20),
        ({"pipeline": 1}, 11),
        ({"pipeline": 8}, 22),
        ({"sequence": 1}, 9),
        ({"expert": 1}, 8),
        ({"offload": "none"}, 1.5),
        ({"offload": "all"}, 1.5),
        ({"schedule": "dualpipev"}, 5),
        ({"tensor": 1, "pipeline": 4, "sequence": 1, "expert": 1, "zero": 0, "offload": "none", "schedule": "dualpipev"}, 55.5),
    ],
)
def test_distance_of_layouts(change: dict[str, object], far: float) -> None:
    """Halving or doubling a dimension costs 8 to 11, a ZeRO stage 1, an offload level 1.5 and another schedule 5."""
    one, other = (ParallelSection.model_validate(BASE | changed) for changed in ({}, change))
    assert distance(one, other) == distance(other, one) == far


def test_offload_levels_are_a_scale() -> None:
    assert distance(ParallelSection(zero=3), ParallelSection(zero=3, offload="all")) == 3


def layouts_of(chosen: Recipe) -> list[tuple[object, ...]]:
    found = workable_layouts(chosen.model, chosen.train, chosen.parallel)
    return sorted((p.tensor, p.pipeline, p.sequence, p.expert, p.zero, p.schedule, p.offload) for p in found)


def with_zero(*dimensions: int) -> list[tuple[object, ...]]:
    """Every ZeRO stage of a layout without a pipeline, with each offload that the stage allows."""
    offloads = {0: ["none"], 1: ["none", "optimizer"], 2: ["none", "optimizer"], 3: ["none", "optimizer", "all"]}
    return [(*dimensions, zero, "1f1b", offload) for zero, allowed in offloads.items() for offload in allowed]


def test_all_layouts_of_one_and_two_workers() -> None:
    assert layouts_of(recipe("parallel.workers=1")) == sorted(with_zero(1, 1, 1, 1))
    pipelines = [(1, 2, 1, 1, zero, schedule, "none") for zero in (0, 1) for schedule in ("1f1b", "dualpipev")]
    expected = [*with_zero(1, 1, 1, 1), *with_zero(2, 1, 1, 1), *with_zero(1, 1, 2, 1), *pipelines]
    assert layouts_of(recipe("parallel.workers=2")) == sorted(expected)


def test_layouts_of_a_mixture_divide_workers_heads_layers_experts_and_batch() -> None:
    """Six workers; 4 layers, 4 KV heads and 4 experts. A batch of 2 leaves 1 or 2 data-parallel workers."""
    chosen = recipe(*MOE, "parallel.workers=6", "parallel.pipeline=3", "train.batch=2")
    dimensions = {layout[:4] for layout in layouts_of(chosen)}
    assert dimensions == {(1, 3, 1, 1), (2, 3, 1, 1)}
    dimensions = {layout[:4] for layout in layouts_of(recipe(*MOE, "parallel.workers=6", "train.batch=12"))}
    assert dimensions == {(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1), (1, 3, 1, 1), (2, 3, 1, 1)}
