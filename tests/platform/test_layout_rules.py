"""Rules for layouts: both sides of every boundary, and the order in which rules apply."""

import re

import pytest

from strata.platform import recipe_file
from strata.platform.layout_rules import Division, ModelSizes, layout_problem, recipe_problem
from strata.platform.recipe import ModelSection, MoESection, ParallelSection, TrainSection

MODEL = ModelSizes(layers=12, heads=12, kv_heads=6, ffn=180, context=240, experts=0, shared_ffn=0)
SPARSE = MODEL._replace(experts=12, shared_ffn=36)
ALONE = Division(
    precision="fp32",
    batch=48,
    micro_batch=2,
    data=3,
    zero=0,
    tensor=1,
    pipeline=1,
    schedule="1f1b",
    sequence=1,
    expert=1,
    offload="none",
)


def problem(model: ModelSizes = MODEL, **changes: object) -> str | None:
    return layout_problem(model, ALONE._replace(**changes))  # type: ignore[arg-type]


def test_micro_batches_divide_the_batch_over_data_parallel_workers() -> None:
    assert ALONE.micro_batches == 8  # 48 / (3 x 2)
    assert ALONE._replace(batch=53).micro_batches == 8


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"zero": 3},
        {"zero": 3, "sequence": 3},
        {"zero": 3, "tensor": 3},
        {"tensor": 3},
        {"pipeline": 2, "zero": 1},
        {"pipeline": 2, "zero": 1, "tensor": 2, "precision": "bf16"},
        {"pipeline": 12},
        {"pipeline": 6, "schedule": "dualpipev", "batch": 72},
        {"pipeline": 4, "schedule": "dualpipev"},  # 8 micro-batches for 4 stages
        {"zero": 1, "offload": "optimizer"},
        {"zero": 2, "offload": "optimizer"},
        {"zero": 3, "offload": "all"},
        {"zero": 1, "tensor": 2, "precision": "bf16"},
        {"sequence": 2, "precision": "bf16"},
        {"pipeline": 2, "zero": 0, "precision": "bf16"},
    ],
)
def test_dense_layouts_that_run(changes: dict[str, object]) -> None:
    assert problem(**changes) is None


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"schedule": "dualpipev"}, "parallel.pipeline is 1"),
        ({"pipeline": 2, "zero": 2}, r"parallel.pipeline=2\) works with ZeRO 0 and 1, not with parallel.zero=2"),
        ({"pipeline": 2, "zero": 3}, "parallel.zero=3"),
        ({"pipeline": 2, "sequence": 2}, r"parallel.sequence=2, parallel.expert=1\)"),
        ({"pipeline": 2, "expert": 2}, r"parallel.sequence=1, parallel.expert=2\)"),
        ({"pipeline": 2, "zero": 1, "offload": "optimizer"}, r"A pipeline does not offload \(parallel.offload=optimizer"),
        ({"pipeline": 13}, "model.layers=12 cannot be divided into the 13 parts"),
        ({"pipeline": 7, "schedule": "dualpipev", "batch": 600}, "into the 14 parts"),
        # 47 // (3 x 2) = 7 micro-batches
        ({"pipeline": 4, "schedule": "dualpipev", "batch": 47}, "DualPipeV needs 8 micro-batches a step; train.batch=47 makes 7"),
        ({"offload": "optimizer"}, "parallel.zero is 0"),
        ({"offload": "all"}, "parallel.zero is 0"),
        ({"offload": "all", "zero": 1}, r"only parallel.zero=3 partitions \(it is 1\)"),
        ({"offload": "all", "zero": 2}, r"only parallel.zero=3 partitions \(it is 2\)"),
        ({"tensor": 5}, "parallel.tensor=5 must divide model.heads=12 and model.kv_heads=6"),
        ({"tensor": 4}, "parallel.tensor=4 must divide model.heads=12"),  # divides 12 heads, not 6
        ({"sequence": 5}, "parallel.sequence=5 must divide model.heads=12"),
        ({"sequence": 12}, "parallel.sequence=12 must divide model.heads=12 and model.kv_heads=6"),
        ({"precision": "bf16", "tensor": 2}, "In bf16 without ZeRO"),
        ({"zero": 1, "sequence": 2, "tensor": 2}, r"does not combine .* \(parallel.tensor=2, parallel.sequence=2\)"),
        ({"expert": 2}, r"parallel.expert=2 distributes experts, and the model has none"),
    ],
)
def test_dense_layouts_that_are_refused(changes: dict[str, object], fragment: str) -> None:
    assert re.search(fragment, problem(**changes) or "")


@pytest.mark.parametrize(
    ("sizes", "changes", "fragment"),
    [
        ({"heads": 10}, {"tensor": 3}, "parallel.tensor=3 must divide model.heads=10"),
        ({"heads": 10}, {"sequence": 3}, "parallel.sequence=3 must divide model.heads=10"),
        ({"ffn": 181}, {"tensor": 2}, "parallel.tensor=2 must divide model.ffn=181"),
        ({"shared_ffn": 37}, {"tensor": 2}, "parallel.tensor=2 must divide model.moe.shared_ffn=37"),
        ({"context": 241}, {"sequence": 2}, "parallel.sequence=2 must divide model.context=241"),
    ],
)
def test_every_size_must_be_divisible(sizes: dict[str, int], changes: dict[str, object], fragment: str) -> None:
    found = problem(MODEL._replace(**sizes), **changes)
    assert found is not None and found.startswith(fragment)
    assert problem(MODEL, **changes) is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"expert": 4},
        {"expert": 12},
        {"zero": 1, "expert": 4, "precision": "bf16"},
        {"tensor": 2},
        {"zero": 3, "offload": "all"},
        {"pipeline": 2},
    ],
)
def test_sparse_layouts_that_run(changes: dict[str, object]) -> None:
    assert problem(SPARSE, **changes) is None


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"expert": 5}, "parallel.expert=5 must divide model.moe.experts=12"),
        ({"expert": 24}, "parallel.expert=24 must divide model.moe.experts=12"),
        ({"sequence": 2}, "balances whole sequences, which parallel.sequence=2"),
        ({"expert": 2, "tensor": 2}, r"is combined with data parallelism only \(parallel.tensor=2\)"),
        ({"expert": 2, "zero": 1, "offload": "optimizer"}, r"does not offload \(parallel.offload=optimizer\)"),
        ({"precision": "bf16", "expert": 2}, "In bf16 without ZeRO"),
    ],
)
def test_sparse_layouts_that_are_refused(changes: dict[str, object], fragment: str) -> None:
    assert re.search(fragment, problem(SPARSE, **changes) or "")


def test_a_recipe_is_checked_by_its_own_keys() -> None:
    """Every key reaches the rules: each change alone violates the rule of its own name."""
    model = ModelSection(layers=4, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=512, context=32)
    sparse = model.model_copy(update={"moe": MoESection(experts=4, top_k=2, shared_ffn=98)})
    train = TrainSection(steps=1, batch=16, micro_batch=2, lr=1e-3, precision="fp32")

    def of(model: ModelSection, **keys: object) -> str | None:
        return recipe_problem(model, train, ParallelSection.model_validate({"workers": 8, "zero": 0} | keys))

    assert of(model, tensor=2) is None
    assert of(sparse, tensor=2) is None
    assert of(sparse, expert=4) is None
    assert "model.heads=4 and model.kv_heads=2" in str(of(model, tensor=4))
    assert "model.kv_heads=2" in str(of(model, sequence=4))
    assert "model.layers=4 cannot be divided into the 8 parts" in str(of(model, pipeline=8))
    assert "model.moe.experts=4" in str(of(sparse, expert=8))
    assert "the model has none" in str(of(model, expert=2))
    assert "parallel.offload=optimizer" in str(of(model, offload="optimizer"))
    wide = sparse.model_copy(update={"kv_heads": 4})
    assert "model.moe.shared_ffn=98" in str(of(wide, tensor=4))
    assert "model.ffn=162" in str(of(wide.model_copy(update={"ffn": 162}), tensor=4))
    assert "model.context=34" in str(of(model.model_copy(update={"kv_heads": 4, "context": 34}), sequence=4))
    # 16 / (4 data-parallel workers x 2) = 2 micro-batches for 2 stages
    assert "train.batch=16 makes 2 (data-parallel workers 4 x train.micro_batch=2)" in str(
        of(model, pipeline=2, schedule="dualpipev")
    )
    bf16 = train.model_copy(update={"precision": "bf16"})
    refused = recipe_problem(model, bf16, ParallelSection(workers=8, tensor=2, zero=0))
    assert refused and refused.startswith("In bf16 without ZeRO")


def test_norm_over_all_heads_excludes_tensor_parallelism() -> None:
    model = recipe_file.load("laptop", ["model.architecture.qk_norm=width"]).model
    train = recipe_file.load("laptop").train
    assert recipe_problem(model, train, ParallelSection(workers=2, tensor=1)) is None
    problem = recipe_problem(model, train, ParallelSection(workers=2, tensor=2))
    assert problem is not None and "span all heads" in problem


@pytest.mark.parametrize(
    "override",
    ["model.moe.bias=true", "model.moe.dense_layers=[0]", "model.moe.normalize=false", "model.architecture.activation=gelu_tanh"],
)
def test_expert_parallelism_needs_plain_experts(override: str) -> None:
    recipe = recipe_file.load("laptop-moe", [override])
    assert recipe_problem(recipe.model, recipe.train, ParallelSection(workers=2, expert=1)) is None
    problem = recipe_problem(recipe.model, recipe.train, ParallelSection(workers=2, expert=2))
    assert problem is not None and "parallel.expert=2" in problem
