"""Llama 2 and 3, SmolLM and SmolLM2."""

from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import activation, attention_biases, decoder
from strata.platform.model_families.family import Family

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
}


def section(config: Config) -> dict[str, Any]:
    config.require("mlp_bias", False)
    return decoder(config, activation(config) | attention_biases(config))


FAMILY = Family("llama", ("LlamaForCausalLM",), DEFAULTS, section)
