"""Qwen1.5-MoE and Qwen2-MoE: a shared expert beside the others, and biases of queries, keys and values."""

from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import activation, decoder, qwen_experts, qwen_window, window_by_layer_types
from strata.platform.model_families.family import Family

DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
    "qkv_bias": True,
}


def section(config: Config) -> dict[str, Any]:
    first = config.count("max_window_layers")
    window = window_by_layer_types(config, qwen_window(config), lambda layer: layer % 2 == 0 and layer < first)
    architecture = activation(config) | {"qkv_bias": config.flag("qkv_bias")} | window
    experts = qwen_experts(config, "num_experts") | {"shared_ffn": config.whole("shared_expert_intermediate_size")}
    return decoder(config, architecture, ffn="moe_intermediate_size", moe=experts)


FAMILY = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), DEFAULTS, section)
