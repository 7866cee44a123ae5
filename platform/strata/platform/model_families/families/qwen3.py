"""Qwen3: RMSNorm of the queries and keys of each head."""

from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import activation, attention_biases, decoder
from strata.platform.model_families.families import qwen2
from strata.platform.model_families.family import Family

DEFAULTS = qwen2.DEFAULTS | {"head_dim": 128, "attention_bias": False}


def section(config: Config) -> dict[str, Any]:
    return decoder(config, activation(config) | attention_biases(config) | {"qk_norm": "head"} | qwen2.window(config))


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), DEFAULTS, section)
