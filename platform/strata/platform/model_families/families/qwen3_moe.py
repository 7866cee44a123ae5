"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in most layers. Files have a tensor for each expert."""

from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import (
    activation,
    attention_biases,
    decoder,
    qwen_experts,
    qwen_window,
    window_of_all_layers,
)
from strata.platform.model_families.family import Family

DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_local_experts": 128,
    "norm_topk_prob": False,
}


def section(config: Config) -> dict[str, Any]:
    window = window_of_all_layers(config, qwen_window(config))
    architecture = activation(config) | attention_biases(config) | {"qk_norm": "head"} | window
    experts = qwen_experts(config, "num_local_experts", "num_experts")
    return decoder(config, architecture, ffn="moe_intermediate_size", moe=experts)


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), DEFAULTS, section)
