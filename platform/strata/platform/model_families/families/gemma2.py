"""Gemma 2: norms before and after each block, scaled embeddings, bounded scores and logits, every other layer sliding."""

from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import activation, attention_biases, decoder, window_by_layer_types
from strata.platform.model_families.family import Family

DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def section(config: Config) -> dict[str, Any]:
    window = window_by_layer_types(config, config.optional_whole("sliding_window"), lambda layer: layer % 2 == 0)
    softcap = {"attention_softcap": config.optional_number("attn_logit_softcapping")}
    return decoder(config, gemma(config) | window | softcap)


def gemma(config: Config) -> dict[str, Any]:
    """Switches that Gemma 2 and 3 share."""
    config.require("use_bidirectional_attention", None, False)
    return (
        activation(config, "hidden_activation")
        | attention_biases(config)
        | {
            "norms": "both",
            "norm_offset": True,
            "embedding_scale": config.whole("hidden_size") ** 0.5,
            "attention_scale": config.number("query_pre_attn_scalar") ** -0.5,
            "logit_softcap": config.optional_number("final_logit_softcapping"),
        }
    )


FAMILY = Family("gemma2", ("Gemma2ForCausalLM",), DEFAULTS, section)
