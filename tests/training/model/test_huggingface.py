import pytest

from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection
from strata.training.model.huggingface import biases, config, export_name, require_exportable

SIZES = {"layers": 2, "hidden": 48, "heads": 6, "kv_heads": 2, "ffn": 80, "vocab": 512, "context": 32}
COMMON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 512,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def section(**moe: int) -> ModelSection:
    own = SIZES | {"rope_theta": 5000.0, "norm_eps": 1e-6, "tie_embeddings": False}
    return ModelSection.model_validate(own | ({"moe": moe} if moe else {}))


DENSE, MIXTURE, SHARED = section(), section(experts=8, top_k=3), section(experts=8, top_k=3, shared_ffn=40)


def test_dense_model_is_a_llama() -> None:
    own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
    assert config(DENSE) == COMMON | own


def test_mixture_of_experts_is_a_mixtral() -> None:
    own = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    assert config(MIXTURE) == COMMON | own | {"num_local_experts": 8, "num_experts_per_tok": 3}


def test_mixture_with_a_shared_expert_is_a_qwen2_moe() -> None:
    own = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "moe_intermediate_size": 80,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "qkv_bias": True,
    }
    assert config(SHARED) == COMMON | own


@pytest.mark.parametrize(
    ("ours", "mixtral"),
    [
        ("mlp.gate.weight", "block_sparse_moe.gate.weight"),
        ("mlp.experts.3.gate_proj.weight", "block_sparse_moe.experts.3.w1.weight"),
        ("mlp.experts.3.down_proj.weight", "block_sparse_moe.experts.3.w2.weight"),
        ("mlp.experts.3.up_proj.weight", "block_sparse_moe.experts.3.w3.weight"),
        ("self_attn.q_proj.weight", "self_attn.q_proj.weight"),
    ],
)
def test_only_mixtral_has_names_of_its_own(ours: str, mixtral: str) -> None:
    name = f"model.layers.1.{ours}"
    assert export_name(MIXTURE, name) == f"model.layers.1.{mixtral}"
    assert export_name(DENSE, name) == export_name(SHARED, name) == name


def test_only_a_shared_expert_needs_biases() -> None:
    """Queries have 6 heads of 8, keys and values 2 heads of 8."""
    assert biases(DENSE) == biases(MIXTURE) == {}
    found = biases(SHARED)
    shapes = {
        f"model.layers.{layer}.self_attn.{kind}_proj.bias": (width,)
        for layer in (0, 1)
        for kind, width in (("q", 48), ("k", 16), ("v", 16))
    }
    assert {name: tuple(bias.shape) for name, bias in found.items()} == shapes
    assert not any(bias.any() for bias in found.values())


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("architecture.qk_norm", {"architecture": {"qk_norm": "head"}}),
        ("architecture.window", {"architecture": {"window": 8, "sliding_layers": [0]}}),
        ("moe.normalize", {"moe": {"experts": 4, "normalize": False}}),
        ("moe.dense_layers", {"moe": {"experts": 4, "dense_layers": [1], "dense_ffn": 8}}),
    ],
)
def test_switches_of_other_families_are_refused_from_scratch(key: str, changes: dict[str, object]) -> None:
    """They would be lost in the export: none of its three architectures has them."""
    scratch = ModelSection.model_validate(SIZES | changes)
    for call in (require_exportable, config):
        with pytest.raises(UserError, match=f"model.{key}=") as error:
            call(scratch)
        assert "model.from" in error.value.fix
    require_exportable(ModelSection.model_validate(SIZES | changes | {"from": "here", "family": "qwen3"}))


def test_wide_heads_are_exported() -> None:
    wide = ModelSection.model_validate(SIZES | {"architecture": {"head_dim": 16}, "moe": {"experts": 4, "shared_ffn": 8}})
    assert config(wide)["head_dim"] == 16 and biases(wide)["model.layers.0.self_attn.q_proj.bias"].shape == (96,)
