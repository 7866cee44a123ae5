"""Plans as recipes: fields, rates, and the reasons against plans that no recipe describes."""

from dataclasses import replace
from typing import Any

import pytest

from strata.planner import recipes
from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.planner.layout import Layout
from strata.planner.memory.activations import EAGER, OWN
from strata.planner.memory.plan import peak_bytes
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware
from strata.platform.layout_rules import Division, ModelSizes
from strata.platform.recipe import ParallelSection, Recipe, TrainSection

SHAPE = Shape("mine", layers=6, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=512, context=128, tied=True)
SPARSE = replace(SHAPE, tied=False, experts=Experts(count=8, top_k=3, ffn=36, shared_ffn=20, shared_gate=True))
LAYOUT = Layout(data=3, tensor=2, pipeline=2, zero=1, micro_batch=2, batch=24, recompute="full")


def test_a_recipe_of_a_plan() -> None:
    found = recipes.as_recipe(SHAPE, LAYOUT, 96)
    model, train, parallel = found.model, found.train, found.parallel
    assert (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn) == (6, 64, 4, 2, 160)
    assert (model.vocab, model.context, model.tie_embeddings, model.moe) == (512, 96, True, None)
    assert (train.batch, train.micro_batch, train.precision, train.recompute, train.compile) == (24, 2, "bf16", "full", True)
    assert (parallel.workers, parallel.zero, parallel.tensor, parallel.pipeline) == (12, 1, 2, 2)
    assert (parallel.schedule, parallel.sequence, parallel.expert, parallel.offload) == ("1f1b", 1, 1, "none")
    assert parallel.device == found.serve.device == "gpu" and found.serve.dtype == "bfloat16"


def test_experts_of_a_recipe() -> None:
    moe = recipes.as_recipe(SPARSE, Layout(data=4, expert=2, batch=8), 96).model.moe
    assert moe and (moe.experts, moe.top_k, moe.shared_ffn) == (8, 3, 20)
    assert recipes.as_recipe(SPARSE, Layout(batch=8), 96).model.ffn == 36


@pytest.mark.parametrize(
    ("tokens", "steps", "warmup", "every"),
    [
        (None, 1000, 100, 10),
        (24 * 96 * 700, 700, 70, 7),
        (24 * 96 * 700 + 1, 701, 70, 7),  # the last step may be beyond the budget
        (24 * 96 * 50_000, 50_000, 2000, 500),
        (24 * 96 * 19_990, 19_990, 1999, 199),
        (24 * 96 * 60, 60, 6, 1),
    ],
)
def test_steps_warmup_and_evaluations(tokens: float | None, steps: int, warmup: int, every: int) -> None:
    train = recipes.as_recipe(SHAPE, LAYOUT, 96, tokens).train
    assert (train.steps, train.warmup, train.eval_every, train.checkpoint_every) == (steps, warmup, every, every)


@pytest.mark.parametrize(
    ("billions", "rate"), [(8, 3e-4), (64, 1.5e-4), (1, 6e-4), (0.2, 1e-3), (8 / 27, 9e-4), (70, 1.5e-4), (405, 8.1e-5)]
)
def test_learning_rate_falls_with_the_third_root(billions: float, rate: float) -> None:
    class Sized(Shape):
        def active_parameters(self) -> int:
            return round(billions * 1e9)

    shape = Sized("sized", 1, 1, 1, 1, 1, 1, 1, 1)
    assert recipes.learning_rate(shape) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("shape", "layout", "reason"),
    [
        ({"latent": Latent(1, 2, 3, 4, 5)}, {}, "mine has latent attention"),
        ({"gated": False}, {}, "mine is not a Llama"),
        ({"biases": True}, {}, "mine is not a Llama"),
        ({"query_biases": True}, {}, "mine is not a Llama"),
        ({"positions": True}, {}, "mine is not a Llama"),
        ({"head_dim": 15}, {}, "4 heads of width 15 do not add up to the hidden size 64"),
        ({"experts": Experts(8, 2, 36, dense_layers=1)}, {}, "The first 1 layers of mine have no experts"),
        ({}, {"context": 2}, "not in a ring"),
        ({}, {"sequence_parallel": True}, "sequence_parallel"),
        ({}, {"precision": "fp16"}, "not in fp16"),
        ({}, {"schedule": "zb-h1"}, "not as zb-h1"),
        ({}, {"zero": 2}, "not with parallel.zero=2"),  # a rule of layouts
        ({}, {}, None),
        ({"experts": Experts(8, 2, 36)}, {}, None),
        ({}, {"schedule": "dualpipev", "interleave": 2}, None),
    ],
)
def test_plans_that_no_recipe_describes(shape: dict[str, Any], layout: dict[str, Any], reason: str | None) -> None:
    found = recipes.layout_problem(replace(SHAPE, **shape), replace(LAYOUT, **layout), 96)
    if reason is None:
        assert found is None
    else:
        assert found and reason in found


def test_sizes_and_division() -> None:
    assert recipes._sizes(SHAPE, 96) == ModelSizes(6, 4, 2, 160, 96, 0, 0)
    assert recipes._sizes(SPARSE, 96) == ModelSizes(6, 4, 2, 36, 96, 8, 20)
    layout = Layout(data=2, tensor=3, pipeline=5, sequence=7, expert=11, zero=2, micro_batch=13, batch=17, offload="all")
    assert recipes._division(layout) == Division("bf16", 17, 13, 2, 2, 3, 5, "1f1b", 7, 11, "all")
    v = recipes._division(replace(layout, schedule="dualpipev", precision="fp32"))
    assert (v.schedule, v.precision) == ("dualpipev", "fp32")


def test_values_outside_a_recipe_are_named() -> None:
    with pytest.raises(UserError, match=r"strata train cannot run this plan\. vocab=3: "):
        recipes.as_recipe(replace(SHAPE, vocab=3), LAYOUT, 96)
    with pytest.raises(UserError, match=r"strata train cannot run this plan\. mine has latent attention"):
        recipes.as_recipe(replace(SHAPE, latent=Latent(1, 2, 3, 4, 5)), LAYOUT, 96)


def recipe(device: str = "gpu", kernels: str = "strata", compiled: bool = True) -> Recipe:
    found = recipes.as_recipe(SHAPE, Layout(data=3, micro_batch=2, batch=24, zero=1), 96)
    return found.model_copy(
        update={
            "parallel": found.parallel.model_copy(update={"device": device}),
            "train": found.train.model_copy(update={"kernels": kernels, "compile": compiled}),
        }
    )


def test_a_recipe_as_a_layout() -> None:
    parallel = ParallelSection(workers=12, tensor=2, pipeline=2, zero=1, schedule="dualpipev", device="cpu")
    train = TrainSection(steps=1, batch=24, micro_batch=2, lr=1e-3, precision="fp32", recompute="selective")
    shape, layout, sequence = recipes.from_recipe(recipe().model_copy(update={"train": train, "parallel": parallel}))
    assert sequence == 96 and shape == replace(SHAPE, name="the recipe's model", context=96)
    assert layout == Layout(
        data=3,
        tensor=2,
        pipeline=2,
        schedule="dualpipev",
        interleave=2,
        zero=1,
        micro_batch=2,
        batch=24,
        recompute="selective",
        precision="fp32",
    )


@pytest.mark.parametrize(
    ("kernels", "compiled", "name"),
    [
        ("strata", True, "strata"),
        ("strata", False, "strata"),
        ("liger", False, "strata"),
        ("torch", True, "strata-torch"),
        ("torch", False, "strata-eager"),
    ],
)
def test_program_of_a_recipe(kernels: str, compiled: bool, name: str) -> None:
    assert recipes.program_of(recipe(kernels=kernels, compiled=compiled).train) == name


def test_planned_peak_is_by_program_and_device() -> None:
    shape, layout, sequence = recipes.from_recipe(recipe())
    assert recipes.planned_peak(recipe()) == peak_bytes(shape, layout, OWN, sequence)
    assert recipes.planned_peak(recipe(kernels="torch", compiled=False)) == peak_bytes(shape, layout, EAGER, sequence)
    assert recipes.planned_peak(recipe("cpu")) == peak_bytes(shape, layout, replace(OWN, cpu=True), sequence)


def test_warning_beyond_the_memory() -> None:
    h100, peak = hardware.gpu("h100"), recipes.planned_peak(recipe())
    assert recipes.warning(recipe(), replace(h100, memory=peak)) is None
    found = recipes.warning(recipe(), replace(h100, memory=peak - 2**20))
    assert found and "1 MiB too little" in found
    assert recipes.warning(recipe("cpu"), replace(h100, memory=1.0)) is None
