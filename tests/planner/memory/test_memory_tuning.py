"""State of runs that train a part of a model: shares that patterns leave, adapters, and projections in NF4, by worked numbers.

A layer of `SHAPE` has projections of 64 x 96 (queries), 64 x 24 (keys, values), 96 x 64 and three of 64 x 160.
"""

from dataclasses import replace
from typing import Any

import pytest

from strata.planner.catalogue.shape import Experts, Shape
from strata.planner.layout import Layout
from strata.planner.memory.activations import OWN, Keeping
from strata.planner.memory.plan import MemoryPlan, peak_bytes, plan_memory
from strata.planner.memory.tuning import NF4_BYTES, Adapters, Tuning, tuning_of
from strata.planner.recipes import planned_peak
from strata.planner.worksheet import Worksheet
from strata.platform import recipe_file
from strata.platform.recipe import PROJECTIONS

SHAPE = Shape("small", layers=4, hidden=64, heads=16, kv_heads=4, head_dim=6, ffn=160, vocab=1000, context=128)
SPARSE = replace(SHAPE, experts=Experts(count=10, top_k=3, ffn=36))
LAYOUT = Layout(micro_batch=3, data=2, batch=24, zero=1)
OUTPUTS = 96 + 24 + 24 + 64 + 160 + 160 + 64  # of all projections of a layer
INPUTS = 64 + 64 + 64 + 96 + 64 + 64 + 160
MATRICES = 2 * 64 * 96 + 2 * 64 * 24 + 3 * 64 * 160
TABLES = 2 * 64000
LAYER = MATRICES + 2 * 64


def plan(layout: Layout = LAYOUT, shape: Shape = SHAPE, **tuning: Any) -> MemoryPlan:
    keeping: Keeping = replace(OWN, tuning=Tuning(**tuning))
    found = plan_memory(shape, layout, 80e9, keeping, Worksheet("memory"), 96)
    assert peak_bytes(shape, layout, keeping, 96) == pytest.approx(found.peak)
    return found


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("zero", "sharers"), [(0, (1, 1, 1)), (1, (1, 1, 2)), (2, (1, 2, 2)), (3, (2, 2, 2))])
def test_only_adapters_have_gradients_and_moments(zero: int, sharers: tuple[int, ...], dora: bool) -> None:
    stage = plan(replace(LAYOUT, zero=zero), adapters=Adapters(5, PROJECTIONS, dora)).stages[0]
    trained = 4 * (5 * (INPUTS + OUTPUTS) + OUTPUTS * dora)
    gradient = 4 if zero else 2  # added up in fp32 with ZeRO
    assert stage.parameters == pytest.approx(2 * (4 * LAYER + TABLES + 64 + trained) / sharers[0])
    assert stage.gradients == pytest.approx(gradient * trained / sharers[1])
    assert stage.optimizer == pytest.approx(12 * trained / sharers[2])


def test_tensor_parallelism_splits_one_side_of_an_adapter() -> None:
    layout = replace(LAYOUT, tensor=2)
    column = plan(layout, adapters=Adapters(5, ("q_proj",), dora=True)).stages[0]
    assert column.gradients == pytest.approx(4 * 4 * (5 * (64 + 48) + 48))
    row = plan(layout, adapters=Adapters(5, ("down_proj",), dora=True)).stages[0]
    assert row.gradients == pytest.approx(4 * 4 * (5 * (80 + 64) + 64))


def test_experts_have_adapters_of_their_own() -> None:
    stage = plan(shape=SPARSE, adapters=Adapters(5, ("up_proj",))).stages[0]
    assert stage.gradients == pytest.approx(4 * 4 * 10 * 5 * (64 + 36))


@pytest.mark.parametrize(("shape", "packed"), [(SHAPE, MATRICES), (SPARSE, MATRICES - 3 * 64 * 160 + 10 * 3 * 64 * 36)])
def test_projections_in_nf4_have_half_a_byte_and_scales(shape: Shape, packed: int) -> None:
    """All projections are quantized, not only those with adapters."""
    small = replace(shape, vocab=100)  # logits would hide the working memory of a layer
    full, quantized = (plan(shape=small, adapters=Adapters(5, ("q_proj",), nf4=nf4)).stages[0] for nf4 in (False, True))
    assert round(NF4_BYTES, 4) == 0.5159
    assert full.parameters - quantized.parameters == pytest.approx(4 * packed * (2 - NF4_BYTES))
    assert (full.gradients, full.optimizer) == (quantized.gradients, quantized.optimizer)
    assert quantized.working > full.working, "a projection is dequantized for its product"


def test_adapters_save_what_their_gradients_need() -> None:
    saved = {}
    for name, adapters in {
        "plain": Adapters(5, ("q_proj",)),
        "dropout": Adapters(5, ("q_proj",), dropout=True),
        "dora": Adapters(5, ("q_proj",), dora=True),
    }.items():
        saved[name] = plan(adapters=adapters).stages[0].activations
    tokens = 3 * 96
    assert saved["dropout"] - saved["plain"] == pytest.approx(4 * tokens * 64 * 2)
    assert saved["dora"] - saved["plain"] == pytest.approx(4 * tokens * 96 * 2)


def test_a_frozen_head_has_no_gradient() -> None:
    trained, frozen = (plan(layers=(1.0, 1.0), head=head).stages[0] for head in (1.0, 0.0))
    assert trained.logits - frozen.logits == pytest.approx(2 * (64000 + 64))
    assert trained.gradients - frozen.gradients == pytest.approx(4 * (64000 + 64))


def test_shares_of_frozen_layers() -> None:
    """A stage of a pipeline counts with the share of the layer that trains most."""
    shares = {"layers": (0.25, 0.5), "embedding": 0.0, "head": 1.0}
    assert plan(**shares).stages[0].gradients == pytest.approx(4 * (0.25 * 4 * LAYER + 64000 + 64))
    first, last = plan(replace(LAYOUT, pipeline=2), **shares).stages
    assert first.gradients == pytest.approx(4 * 0.5 * 2 * LAYER)
    assert last.gradients == pytest.approx(4 * (0.5 * 2 * LAYER + 64000 + 64))


def recipe_tuning(*words: str) -> Tuning | None:
    recipe = recipe_file.load("laptop", ["model.layers=4", *words])
    return tuning_of(recipe.model, recipe.train)


def test_a_recipe_that_trains_all_has_no_tuning() -> None:
    assert recipe_tuning() is None


def test_patterns_of_names_are_shares() -> None:
    half = recipe_tuning("train.freeze=['model.layers.[0-1].*', 'lm_head.*']", "model.tie_embeddings=false")
    assert half is not None and half.layers == (0.5, 1.0) and half.embedding == 1.0 and half.head < 0.01
    tied = recipe_tuning("train.freeze=['model.embed_tokens.*']", "model.tie_embeddings=true")
    assert tied is not None and tied.layers == (1.0, 1.0) and tied.embedding == 0.0 and tied.head < 0.01
    experts = recipe_tuning("train.freeze=['*.mlp.experts.*']", "model.moe.experts=4")
    assert experts is not None and experts.experts == (0.0, 0.0) and experts.layers == (1.0, 1.0)


def test_a_recipe_with_adapters_needs_less_memory() -> None:
    lora = "train.lora={rank: 4, targets: [q_proj, v_proj]}"
    whole, adapted = (planned_peak(recipe_file.load("h200", words)) for words in ([], [lora]))
    quantized = planned_peak(recipe_file.load("h200", [lora, "train.lora.base=nf4"]))
    assert quantized < adapted < 0.9 * whole
