"""OLMo 2: norms after each block, and of queries and keys over all heads."""

from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import activation, attention_biases, decoder
from strata.platform.model_families.family import Family

DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": False,
}


def section(config: Config) -> dict[str, Any]:
    return decoder(config, activation(config) | attention_biases(config) | {"norms": "post", "qk_norm": "width"})


FAMILY = Family("olmo2", ("Olmo2ForCausalLM",), DEFAULTS, section)
