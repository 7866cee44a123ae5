"""Model sections from config.json files: defaults, forms of both versions of transformers, and refusals one by one."""

from typing import Any

import pytest
import transformers
from tiny_models import ROWS, Tiny

from strata.platform.errors import UserError
from strata.platform.model_families import registry
from strata.platform.recipe import ModelSection


def tree(architecture: str, values: dict[str, Any]) -> dict[str, Any]:
    family, config = registry.answering({"architectures": [architecture]} | values, "here")
    return family.section(config)


def section(architecture: str, values: dict[str, Any]) -> ModelSection:
    family, config = registry.answering({"architectures": [architecture]} | values, "here")
    return ModelSection.model_validate({"from": "here", "family": family.name, "context": 64} | family.section(config))


def test_every_family_has_a_row() -> None:
    assert {row.family for row in ROWS.values()} == set(registry.every())
    named = {architecture for family in registry.every().values() for architecture in family.architectures}
    assert {row.architecture for row in ROWS.values()} == named


@pytest.mark.parametrize("architecture", sorted({row.architecture for row in ROWS.values()}))
def test_absent_keys_have_the_defaults_of_transformers(architecture: str) -> None:
    written = getattr(transformers, architecture).config_class().to_dict()
    assert tree(architecture, {}) == tree(architecture, {key: value for key, value in written.items() if key != "architectures"})


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_short_and_full_configurations_agree(row: Tiny) -> None:
    """A file with only the keys that differ from defaults, and the one that transformers writes."""
    written = getattr(transformers, row.architecture).config_class(**row.config).to_dict() | {"architectures": [row.architecture]}
    assert section(row.architecture, row.config) == section(row.architecture, written)


# Forms that transformers 4 wrote, with the keys that decide the model.
LLAMA_3 = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
GEMMA_3 = {
    "hidden_size": 1152,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 20000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 3000000.0,
    "sliding_window": 512,
    "sliding_window_pattern": 3,
}
GPT_OSS = {
    "num_hidden_layers": 2,
    "rope_theta": 140000,
    "rope_scaling": {
        "beta_fast": 31.0,
        "beta_slow": 2.0,
        "factor": 16.0,
        "original_max_position_embeddings": 2048,
        "rope_type": "yarn",
        "truncate": False,
    },
    "layer_types": ["sliding_attention", "full_attention"],
}


def test_llama_3() -> None:
    found = section("LlamaForCausalLM", LLAMA_3)
    scaling = found.architecture.rope_scaling
    assert scaling and (scaling.kind, scaling.factor, scaling.original_context) == ("llama3", 32.0, 8192)
    assert (scaling.low_frequency_factor, scaling.high_frequency_factor) == (1.0, 4.0)
    assert (found.rope_theta, found.tie_embeddings, found.head_dim, found.kv_heads, found.vocab) == (5e5, True, 64, 8, 32000)


def test_gemma_3() -> None:
    found = section("Gemma3ForCausalLM", GEMMA_3)
    own = found.architecture
    assert own.rope_scaling and (own.rope_scaling.kind, own.rope_scaling.factor) == ("linear", 8.0)
    assert (found.rope_theta, own.sliding_rope_theta, own.window, own.sliding_layers) == (3e6, 2e4, 512, (0, 1, 3, 4, 6))
    assert (own.embedding_scale, own.attention_scale, own.norms, own.norm_offset) == (1152**0.5, 1 / 16, "both", True)
    assert (own.qk_norm, own.activation, own.attention_softcap, own.logit_softcap) == ("head", "gelu_tanh", None, None)


def test_gpt_oss() -> None:
    found = section("GptOssForCausalLM", GPT_OSS)
    own, scaling = found.architecture, found.architecture.rope_scaling
    assert scaling and (scaling.kind, scaling.factor, scaling.original_context) == ("yarn", 16.0, 2048)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate, scaling.attention_factor) == (31.0, 2.0, False, None)
    assert (own.qkv_bias, own.output_bias, own.sinks, own.activation) == (True, True, True, "clamped_silu")
    assert (own.window, own.sliding_layers, found.rope_theta) == (128, (0,), 140000)
    assert found.moe and (found.moe.bias, found.moe.normalize, found.moe.experts, found.moe.top_k) == (True, True, 128, 4)


@pytest.mark.parametrize("rope", [{"rope_parameters": None}, {"rope_scaling": None}, {}])
def test_gpt_oss_rescales_by_default(rope: dict[str, Any]) -> None:
    scaling = section("GptOssForCausalLM", rope).architecture.rope_scaling
    assert scaling and (scaling.kind, scaling.factor, scaling.original_context) == ("yarn", 32.0, 4096)
    assert section("GptOssForCausalLM", {"rope_parameters": {"rope_type": "default"}}).architecture.rope_scaling is None


def test_absent_and_null_windows_differ() -> None:
    assert section("MistralForCausalLM", {"num_hidden_layers": 2}).architecture.sliding_layers == (0, 1)
    assert section("MistralForCausalLM", {}).architecture.window == 4096
    assert section("MistralForCausalLM", {"sliding_window": None}).architecture.window is None


def test_unused_windows_of_qwen_are_none() -> None:
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM"):
        assert section(architecture, {"sliding_window": 131072, "max_window_layers": 0}).architecture.sliding_layers == ()


@pytest.mark.parametrize("full", [0, 1, 2, 3])
def test_first_layers_of_qwen_are_full(full: int) -> None:
    values = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": full}
    assert section("Qwen2ForCausalLM", values).architecture.sliding_layers == tuple(range(full, 2))


@pytest.mark.parametrize(
    ("step", "listed", "dense"), [(1, [], ()), (1, [2], (2,)), (2, [], (0, 2)), (2, [1], (0, 1, 2)), (3, None, (0, 1, 3))]
)
def test_dense_layers_of_qwen(step: int, listed: list[int] | None, dense: tuple[int, ...]) -> None:
    values = {"num_hidden_layers": 4, "decoder_sparse_step": step, "mlp_only_layers": listed}
    found = section("Qwen3MoeForCausalLM", values)
    assert found.moe and found.moe.dense_layers == dense and found.moe.dense_ffn == (6144 if dense else 0) and found.ffn == 768


def test_experts_have_two_names() -> None:
    for key in ("num_experts", "num_local_experts"):
        for architecture in ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM"):
            found = section(architecture, {key: 12})
            assert found.moe and found.moe.experts == 12


@pytest.mark.parametrize(
    ("parameters", "factor"),
    [
        ({"mscale": 1.0}, None),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 2.0}, (0.1 * 1.3862943611198906 + 1) / (0.2 * 1.3862943611198906 + 1)),
        ({"mscale": 1.0, "mscale_all_dim": 2.0, "attention_factor": 1.5}, 1.5),
    ],
)
def test_attention_factor_of_yarn(parameters: dict[str, Any], factor: float | None) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512} | parameters
    scaling = section("LlamaForCausalLM", {"rope_parameters": yarn}).architecture.rope_scaling
    assert scaling and scaling.attention_factor == (None if factor is None else pytest.approx(factor))


def test_original_context_of_yarn() -> None:
    """In the scaling, else beside it, else the model's own; its ratio to the longest context replaces an absent factor."""
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    for values, expected in (
        ({"rope_parameters": yarn}, (4.0, 512)),
        ({"rope_parameters": yarn, "original_max_position_embeddings": 1024}, (2.0, 1024)),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 3.0}}, (3.0, 2048)),
    ):
        scaling = section("LlamaForCausalLM", values).architecture.rope_scaling
        assert scaling and (scaling.factor, scaling.original_context) == expected


NO_KEY = "architectures=None in the config.json of here"
REFUSED = [
    ("BertForMaskedLM", {}, "here has the architecture BertForMaskedLM", "LlamaForCausalLM"),
    ("LlamaModel", {}, "here has the architecture LlamaModel", "LlamaForCausalLM"),
    ("Gemma3ForConditionalGeneration", {}, "Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    ("LlamaForCausalLM", {"architectures": None}, NO_KEY, "Correct"),
    ("LlamaForCausalLM", {"architectures": ["A", "B"]}, "architectures=['A', 'B']", "Correct"),
    ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias=True", "another model"),
    ("SmolLM3ForCausalLM", {"mlp_bias": True}, "mlp_bias=True", "another model"),
    ("LlamaForCausalLM", {"hidden_act": "relu"}, "hidden_act='relu'", "another model"),
    ("LlamaForCausalLM", {"hidden_act": ["silu"]}, "hidden_act=['silu']", "another model"),
    ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation='gelu'", "another model"),
    ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True", "another model"),
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True", "another model"),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0", "another model"),
    ("LlamaForCausalLM", {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'", "unquantized"),
    ("LlamaForCausalLM", {"quantization_config": "odd"}, "quant_method='odd'", "unquantized"),
    ("GptOssForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'", "Mxfp4Config(dequantize=True)"),
    ("GptOssForCausalLM", {"swiglu_limit": 5.0}, "swiglu_limit=5.0", "another model"),
    ("GptOssForCausalLM", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0", "another model"),
    ("GptOssForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu'", "another model"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "longrope"}}, "rope_type='longrope'", "another model"),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "proportional"}}, "rope_type='proportional'", "another model"),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": None}}, "rope_type=None", "another model"),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type=['yarn']", "another model"),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5", "another model"),
    (
        "LlamaForCausalLM",
        {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.25}},
        "partial_rotary_factor=0.25",
        "another model",
    ),
    ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention", "another model"),
    ("LlamaForCausalLM", {"rope_parameters": [1]}, "rope_parameters=[1]", "Correct"),
    ("LlamaForCausalLM", {"rope_theta": None}, "rope_theta=None", "Correct"),
    ("LlamaForCausalLM", {"rope_theta": 0}, "rope_theta=0", "Correct"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear"}}, "factor=None", "Correct"),
    ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor=None", "Correct"),
    ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "yarn", "truncate": "no"}}, "truncate='no'", "Correct"),
    (
        "Gemma3ForCausalLM",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters.sliding_attention=",
        "another model",
    ),
    ("MistralForCausalLM", {"layer_types": ["full_attention"] * 32}, "layer_types=", "another model"),
    ("Qwen3ForCausalLM", {"layer_types": ["linear_attention"] * 32}, "layer_types='linear_attention'", "another model"),
    ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types=", "Correct"),
    ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"] * 32}, "no sliding_window is in use", "Correct"),
    ("Qwen2ForCausalLM", {"max_window_layers": -1}, "max_window_layers=-1", "Correct"),
    ("Qwen2ForCausalLM", {"use_sliding_window": 1}, "use_sliding_window=1", "Correct"),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": ["1"]}, "mlp_only_layers=['1']", "Correct"),
    ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, "decoder_sparse_step=0", "Correct"),
    ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0", "Correct"),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1]}, "no_rope_layers=[1, 1]", "Correct"),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [2] * 36}, "no_rope_layers=", "Correct"),
    ("LlamaForCausalLM", {"hidden_size": None}, "hidden_size=None", "Correct"),
    ("LlamaForCausalLM", {"hidden_size": 0}, "hidden_size=0", "Correct"),
    ("LlamaForCausalLM", {"hidden_size": True}, "hidden_size=True", "Correct"),
    ("LlamaForCausalLM", {"hidden_size": "64"}, "hidden_size='64'", "Correct"),
    ("LlamaForCausalLM", {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf", "Correct"),
    ("LlamaForCausalLM", {"rms_norm_eps": True}, "rms_norm_eps=True", "Correct"),
    ("LlamaForCausalLM", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'", "Correct"),
    ("LlamaForCausalLM", {"attention_bias": None}, "attention_bias=None", "Correct"),
]


@pytest.mark.parametrize(("architecture", "values", "cause", "fix"), REFUSED)
def test_refusals_name_the_key_and_a_way_out(architecture: str, values: dict[str, Any], cause: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        tree(architecture, values)
    assert cause in error.value.cause and "here" in error.value.cause and fix in error.value.fix


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.family=qwen9") as error:
        registry.named("qwen9")
    assert "qwen3" in error.value.fix
