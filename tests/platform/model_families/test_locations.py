"""Locations of parameters in the tensors of a family's files."""

import pytest
from tiny_models import ROWS

from strata.platform.model_families import registry
from strata.platform.model_families.family import Location
from strata.platform.recipe import ModelSection


def tensors(name: str) -> dict[str, Location]:
    row = ROWS[name]
    family, config = registry.answering({"architectures": [row.architecture]} | row.config, "here")
    section = ModelSection.model_validate({"from": "here", "family": family.name, "context": 64} | family.section(config))
    return family.tensors(section)


def test_experts_of_gpt_oss_are_slices() -> None:
    found, experts = tensors("gpt_oss"), "model.layers.1.mlp.experts"
    every, gate, up = slice(None), slice(0, None, 2), slice(1, None, 2)
    for name, expected in {
        "gate_proj.weight": Location(f"{experts}.gate_up_proj", (4, 32, 96), (3, every, gate), True),
        "up_proj.weight": Location(f"{experts}.gate_up_proj", (4, 32, 96), (3, every, up), True),
        "down_proj.weight": Location(f"{experts}.down_proj", (4, 48, 32), (3,), True),
        "gate_proj.bias": Location(f"{experts}.gate_up_proj_bias", (4, 96), (3, gate)),
        "up_proj.bias": Location(f"{experts}.gate_up_proj_bias", (4, 96), (3, up)),
        "down_proj.bias": Location(f"{experts}.down_proj_bias", (4, 32), (3,)),
    }.items():
        assert found[f"{experts}.3.{name}"] == expected
    assert found["model.layers.0.mlp.gate.bias"] == Location("model.layers.0.mlp.router.bias", (4,))
    assert found["model.layers.0.self_attn.sinks"] == Location("model.layers.0.self_attn.sinks", (4,))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("mlp.gate.weight", "block_sparse_moe.gate.weight"),
        ("mlp.experts.4.gate_proj.weight", "block_sparse_moe.experts.4.w1.weight"),
        ("mlp.experts.4.down_proj.weight", "block_sparse_moe.experts.4.w2.weight"),
        ("mlp.experts.4.up_proj.weight", "block_sparse_moe.experts.4.w3.weight"),
        ("self_attn.q_proj.weight", "self_attn.q_proj.weight"),
    ],
)
def test_mixtral_has_names_of_its_own(ours: str, theirs: str) -> None:
    assert tensors("mixtral")[f"model.layers.2.{ours}"].tensor == f"model.layers.2.{theirs}"


@pytest.mark.parametrize("name", sorted(ROWS.keys() - {"mixtral", "gpt_oss"}))
def test_other_families_have_the_same_names(name: str) -> None:
    assert all(location == Location(ours, location.shape) for ours, location in tensors(name).items())


@pytest.mark.parametrize("name", ROWS)
def test_the_output_layer_is_absent_when_tied(name: str) -> None:
    row = ROWS[name]
    defaults = registry.named(row.family).defaults
    assert ("lm_head.weight" in tensors(name)) is not row.config.get("tie_word_embeddings", defaults["tie_word_embeddings"])
