"""Mistral: every layer attends to a sliding window, if there is one."""

from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import activation, decoder, window_of_all_layers
from strata.platform.model_families.family import Family

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
}


def section(config: Config) -> dict[str, Any]:
    config.require("layer_types", None)  # transformers ignores it in this family
    return decoder(config, activation(config) | window_of_all_layers(config, config.optional_whole("sliding_window")))


FAMILY = Family("mistral", ("MistralForCausalLM",), DEFAULTS, section)
