"""Layouts that an elastic run selects for a capacity."""

import numpy as np
import pytest

from strata.platform import recipe_file
from strata.platform.hardware import catalogue
from strata.platform.recipe import Recipe
from strata.training.data.sampler import micro_batches, step_indices
from strata.training.elastic.choice import choose
from strata.training.layout import accumulation, described

SHAPE = ("model.layers=4", "model.heads=8", "model.kv_heads=8", "model.hidden=64", "train.batch=24", "train.micro_batch=2")


def recipe(*overrides: str) -> Recipe:
    return recipe_file.load("laptop", [*SHAPE, *overrides])


def chosen(recipe: Recipe, capacity: int, gpu: str | None = None) -> str | None:
    layout = choose(recipe.model, recipe.train, recipe.parallel, capacity, catalogue.gpu(gpu) if gpu else None)
    return layout and described(layout.parallel)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["parallel.workers=4..8"],
            {9: "8 workers: data 8", 8: "8 workers: data 8", 7: "6 workers: data 6", 5: "4 workers: data 4", 3: None},
        ),
        (  # replicas first
            ["parallel.workers=2..8", "parallel.pipeline=2"],
            {8: "8 workers: data 4 x pipeline 2", 7: "6 workers: data 3 x pipeline 2", 3: "2 workers: pipeline 2", 1: None},
        ),
        (  # then fewer stages, with as many workers as possible
            ["parallel.workers=1..8", "parallel.pipeline=4", "parallel.schedule=dualpipev", "model.layers=8"],
            {8: "8 workers: data 2 x pipeline 4", 5: "4 workers: pipeline 4", 3: "3 workers: data 3", 1: "1 worker"},
        ),
        (  # then any dimensions
            ["parallel.workers=1..8", "parallel.tensor=4"],
            {8: "8 workers: data 2 x tensor 4", 7: "4 workers: tensor 4", 3: "3 workers: data 3", 2: "2 workers: tensor 2"},
        ),
    ],
)
def test_nearest_layout_first(overrides: list[str], expected: dict[int, str | None]) -> None:
    assert {capacity: chosen(recipe(*overrides), capacity) for capacity in expected} == expected


@pytest.mark.parametrize("capacity", range(1, 13))
def test_the_global_batch_is_the_same_in_every_layout(capacity: int) -> None:
    read = recipe("parallel.workers=1..12", "train.micro_batch=8")
    layout = choose(read.model, read.train, read.parallel, capacity)
    assert layout and layout.parallel.workers <= capacity
    steps = accumulation(layout.train, layout.parallel)
    assert steps * layout.parallel.data * layout.train.micro_batch == read.train.batch
    assert layout.train.micro_batch <= read.train.micro_batch
    assert not layout.parallel.workers.elastic


@pytest.mark.parametrize("capacity", range(4, 13))
def test_each_sequence_of_a_step_is_read_once_in_every_layout(capacity: int) -> None:
    read = recipe("parallel.workers=2..12", "parallel.pipeline=2", "train.micro_batch=4")
    layout = choose(read.model, read.train, read.parallel, capacity)
    assert layout
    data, count = layout.parallel.data, accumulation(layout.train, layout.parallel)
    for step in (0, 7, 1000):
        everyone = step_indices(step, read.train.batch, 0, 1, windows=97, seed=3)
        read_by_ranks = [batch for rank in range(data) for batch in micro_batches(everyone, rank, data, count)]
        assert {len(batch) for batch in read_by_ranks} == {layout.train.micro_batch}
        assert np.concatenate(read_by_ranks).tolist() == everyone.tolist()


def test_the_planner_ranks_layouts_on_a_known_gpu() -> None:
    read = recipe("parallel.workers=1..8", "parallel.tensor=4", "parallel.device=gpu")
    assert chosen(read, 8, "H100") == "8 workers: data 2 x tensor 4"
    # Three workers can be data parallel or not all used; the planner's step time decides.
    assert chosen(read, 3, "H100") == "3 workers: data 3"


def test_layouts_that_fit_in_memory_by_plan_come_first() -> None:
    read = recipe_file.load("8xh100", ["parallel.workers=1..8"])
    one = choose(read.model, read.train, read.parallel, 1, catalogue.gpu("H100"))
    assert one is not None and one.parallel.offload != "none"  # Llama-3 8B does not fit on one GPU otherwise
    half = choose(read.model, read.train, read.parallel, 4, catalogue.gpu("H100"))
    assert half is not None and half.parallel.workers == 4
