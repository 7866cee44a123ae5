"""SmolLM3: a Llama in which some layers have no rotary embedding."""

from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import activation, attention_biases, decoder, qwen_window, window_by_layer_types
from strata.platform.model_families.family import Family

DEFAULTS = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 2_000_000.0,
    "use_sliding_window": False,
    "no_rope_layer_interval": 4,
    "attention_bias": False,
    "mlp_bias": False,
}


def section(config: Config) -> dict[str, Any]:
    config.require("mlp_bias", False)
    unrotated = _unrotated(config)
    window = window_by_layer_types(config, qwen_window(config), lambda layer: layer in unrotated)
    architecture = activation(config) | attention_biases(config) | window | {"unrotated_layers": unrotated}
    return decoder(config, architecture)


def _unrotated(config: Config) -> list[int]:
    """Despite its name, `no_rope_layers` has a 1 for each layer with rotary embedding."""
    layers, rotated = config.whole("num_hidden_layers"), config.get("no_rope_layers")
    if rotated is None:
        interval = config.whole("no_rope_layer_interval")
        return [layer for layer in range(layers) if (layer + 1) % interval == 0]
    if not isinstance(rotated, list) or len(rotated) < layers or any(each not in (0, 1) for each in rotated):
        config.wrong("no_rope_layers", rotated, f"is not a list of a 0 or 1 for each of the {layers} layers")
    return [layer for layer in range(layers) if not rotated[layer]]


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), DEFAULTS, section)
