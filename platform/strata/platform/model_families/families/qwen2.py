"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import activation, decoder, qwen_window, window_by_layer_types
from strata.platform.model_families.family import Family

DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def section(config: Config) -> dict[str, Any]:
    return decoder(config, activation(config) | {"qkv_bias": True} | window(config))


def window(config: Config) -> dict[str, Any]:
    """The first `max_window_layers` layers attend to everything."""
    full = config.count("max_window_layers")
    return window_by_layer_types(config, qwen_window(config), lambda layer: layer >= full)


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), DEFAULTS, section)
