"""Parts of a model section that most families read from the same keys."""

from collections.abc import Callable
from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.rope import Rotary, rope

Tree = dict[str, Any]

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # by their names in transformers


def decoder(
    config: Config,
    architecture: Tree,
    *,
    ffn: str = "intermediate_size",
    moe: Tree | None = None,
    rotary: Rotary | None = None,
) -> Tree:
    """Section of a decoder. `ffn` is the key with the width of a feed-forward block or of an expert."""
    theta, scaling = rotary or rope(config)
    hidden, heads, head_dim = config.whole("hidden_size"), config.whole("num_attention_heads"), config.optional_whole("head_dim")
    apart = head_dim is not None and head_dim * heads != hidden
    return {
        "layers": config.whole("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.optional_whole("num_key_value_heads") or heads,
        "ffn": config.whole(ffn),
        "vocab": config.whole("vocab_size"),
        "rope_theta": theta,
        "norm_eps": config.number("rms_norm_eps"),
        "tie_embeddings": config.flag("tie_word_embeddings"),
        "moe": moe,
        "architecture": {"head_dim": head_dim if apart else None, "rope_scaling": scaling} | architecture,
    }


def activation(config: Config, key: str = "hidden_act") -> Tree:
    name = config.get(key)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        config.refuse(key, name)
    return {"activation": ACTIVATIONS[name]}


def attention_biases(config: Config) -> Tree:
    biases = config.flag("attention_bias")
    return {"qkv_bias": biases, "output_bias": biases}


def window_of_all_layers(config: Config, window: int | None) -> Tree:
    return {"window": window, "sliding_layers": list(range(config.whole("num_hidden_layers")))} if window else {}


def window_by_layer_types(config: Config, window: int | None, slides: Callable[[int], bool]) -> Tree:
    """Sliding layers by the key `layer_types`; without it `slides` decides by a layer's number, if there is a window."""
    layers = config.whole("num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if window and slides(layer) else "full_attention" for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        config.wrong("layer_types", types, f"is not a list of the {layers} layers' types")
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            config.refuse("layer_types", kind)
    sliding = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    if sliding and window is None:
        config.wrong("layer_types", types, "has sliding layers, and no sliding_window is in use")
    return {"window": window, "sliding_layers": sliding} if sliding else {}


def qwen_window(config: Config) -> int | None:
    """A window that Qwen's configurations set but do not use counts as none."""
    return config.optional_whole("sliding_window") if config.flag("use_sliding_window") else None


def qwen_experts(config: Config, *experts: str) -> Tree:
    """Mixture of experts of Qwen's families; `experts` are the keys with the number of experts."""
    layers, step = config.whole("num_hidden_layers"), config.whole("decoder_sparse_step")
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        config.wrong("mlp_only_layers", listed, "is not a list of layers")
    dense = [layer for layer in range(layers) if layer in listed or (layer + 1) % step]
    return {
        "experts": config.whole(*experts),
        "top_k": config.whole("num_experts_per_tok"),
        "normalize": config.flag("norm_topk_prob"),
        "dense_layers": dense,
        "dense_ffn": config.whole("intermediate_size") if dense else 0,
    }
