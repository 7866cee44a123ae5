from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from strata.platform import recipe_file
from strata.training.engine import deepspeed_config, parameter_groups, set_learning_rate
from strata.training.model.llama import Llama


def test_accumulation_times_micro_batch_is_the_batch() -> None:
    recipe = recipe_file.load("laptop", ["train.batch=24", "train.micro_batch=2", "parallel.workers=3"])
    config = deepspeed_config(recipe.model, recipe.train, recipe.parallel)
    assert config["gradient_accumulation_steps"] == 4
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 3 == 24


def test_only_the_layers_matrices_decay() -> None:
    recipe = recipe_file.load("laptop", ["model.layers=1"])
    model = Llama(recipe.model)
    matrices, tables, norms = parameter_groups(model.named_parameters(), recipe.train)
    assert matrices["weight_decay"] == recipe.train.weight_decay and len(matrices["params"]) == 7
    assert tables["weight_decay"] == norms["weight_decay"] == 0.0
    assert tables["ratio"] == recipe.train.embedding_lr_ratio
    assert sum(len(group["params"]) for group in (matrices, tables, norms)) == len(list(model.parameters()))


def config(*overrides: str) -> dict[str, Any]:
    """DeepSpeed's section of a recipe with 8 sequences a step, 2 a micro-batch: 4 micro-batches on one worker."""
    shape = ("model.heads=8", "model.kv_heads=4", "model.layers=4", "train.batch=8", "train.micro_batch=2")
    recipe = recipe_file.load("laptop", [*shape, "parallel.workers=1", *overrides])
    return deepspeed_config(recipe.model, recipe.train, recipe.parallel)


def test_sections_of_a_plain_recipe() -> None:
    assert config("parallel.zero=2", "train.clip=0.7", "train.precision=fp32") == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.7,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 50_000_000},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": False},
        "steps_per_print": 1_000_000_000,
        "timers": {"throughput": {"enabled": False}},
    }


@pytest.mark.parametrize(
    ("offload", "sections"),
    [("none", set()), ("optimizer", {"offload_optimizer"}), ("all", {"offload_optimizer", "offload_param"})],
)
def test_offloaded_state(offload: str, sections: set[str]) -> None:
    zero = config("parallel.zero=3", f"parallel.offload={offload}")["zero_optimization"]
    assert zero.keys() - {"stage", "reduce_bucket_size"} == sections
    assert all(zero[name] == {"device": "cpu"} for name in sections)


@pytest.mark.parametrize(
    ("overrides", "in_fp32"),
    [
        ("zero=1", True),
        ("zero=2", True),
        ("zero=0", False),
        ("zero=2 train.precision=fp32", False),
        ("zero=2 train.batch=2", False),  # one micro-batch: nothing accumulates
        ("zero=2 train.batch=4", True),
        ("zero=1 workers=2 sequence=2", False),
        ("zero=2 workers=2 sequence=2", True),
        ("zero=3 workers=4 sequence=2", True),
        ("zero=1 workers=2 tensor=2", True),
    ],
)
def test_bf16_gradients_accumulate_in_fp32(overrides: str, in_fp32: bool) -> None:
    words = [word if "." in word else f"parallel.{word}" for word in overrides.split()]
    found = config("train.precision=bf16", *words)
    assert found.get("data_types") == ({"grad_accum_dtype": "fp32"} if in_fp32 else None)
    enabled = {"enabled": "train.precision=fp32" not in words}
    assert found["bf16"] == (enabled | {"immediate_grad_update": True} if in_fp32 else enabled)


@pytest.mark.parametrize(
    ("overrides", "section"),
    [
        ("tensor=2", "tensor_parallel"),
        ("tensor=2 pipeline=2 zero=0", None),  # the stage is divided before the engine is built
        ("pipeline=2 zero=0", None),
        ("pipeline=2 zero=0 schedule=dualpipev", "pipeline"),
        ("model.moe.experts=4 expert=2", "expert_parallel"),
        ("model.moe.experts=4", None),
    ],
)
def test_section_of_a_layout(overrides: str, section: str | None) -> None:
    words = [word if "." in word else f"parallel.{word}" for word in overrides.split()]
    found = config("parallel.workers=4", "train.micro_batch=1", "train.batch=16", *words)
    assert found.keys() & {"tensor_parallel", "pipeline", "expert_parallel"} == ({section} if section else set())
    if section == "tensor_parallel":
        assert found[section]["autotp_size"] == 2
    if section == "expert_parallel":
        assert found[section]["autoep_size"] == 2
    if section == "pipeline":
        assert found[section] == {"pipe_partitioned": False, "grad_partitioned": False}


def test_groups_by_name() -> None:
    recipe = recipe_file.load("laptop", ["train.weight_decay=0.3", "train.embedding_lr_ratio=7"])
    names = {
        "matrices": ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight"],
        "tables": ["model.embed_tokens.weight", "lm_head.weight"],
        "norms": ["model.layers.0.input_layernorm.weight", "model.norm.weight"],
    }
    named = {name: nn.Parameter(torch.zeros(2)) for group in names.values() for name in group}
    groups = parameter_groups(named.items(), recipe.train)
    assert [(g["name"], g["weight_decay"], g["ratio"]) for g in groups] == [
        ("matrices", 0.3, 1.0),
        ("tables", 0.0, 7.0),
        ("norms", 0.0, 1.0),
    ]
    for group in groups:
        assert [id(p) for p in group["params"]] == [id(named[name]) for name in names[group["name"]]]


def test_experts_have_groups_of_their_own() -> None:
    recipe = recipe_file.load("laptop")
    expert, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    expert.allreduce, expert.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    groups = parameter_groups([("a.weight", other), ("mlp.experts.w1", expert)], recipe.train)
    assert sorted(len(group["params"]) for group in groups if group.get("moe")) == [1]
    groups = parameter_groups([("a.weight", other)], recipe.train)
    assert len(groups) == 3 and not any(group.get("moe") for group in groups)


def test_learning_rate_of_a_group_is_scaled_by_its_ratio() -> None:
    groups = [{"ratio": 1.0, "lr": 0.0}, {"ratio": 7.0, "lr": 0.0}]
    set_learning_rate(SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups)), 0.02)
    assert [group["lr"] for group in groups] == pytest.approx([0.02, 0.14])
