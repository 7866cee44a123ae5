from itertools import product

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import ParallelSection, Recipe
from strata.training.layout import Place, place, require_workable

MOE = ("model.moe.experts=4",)


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
        (("parallel.pipeline=2", "parallel.schedule=dualpipev", "train.batch=8"), "needs 4 micro-batches", "1f1b"),
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
    ],
)
def test_unsupported_layouts_are_refused_with_the_nearest_supported(
    overrides: tuple[str, ...], problem: str, nearest: str
) -> None:
    with pytest.raises(UserError) as raised:
        require(recipe(*overrides))
    assert problem in raised.value.cause and nearest in raised.value.fix
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


def test_places_are_unique_and_tensor_ranks_are_adjacent() -> None:
    parallel = ParallelSection(workers=16, tensor=2, pipeline=2, sequence=2)
    places = [place(rank, parallel) for rank in range(16)]
    assert sorted(places, key=str) == sorted((Place(*at) for at in product(range(2), repeat=4)), key=str)
    assert places[0] == Place(0, 0, 0, 0) and places[1] == Place(0, 0, 0, 1)
