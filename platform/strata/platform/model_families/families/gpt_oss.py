"""gpt-oss: attention sinks, biases everywhere, and experts stored together with gate and up interleaved."""

import re
from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import attention_biases, decoder, window_by_layer_types
from strata.platform.model_families.family import Family, Location, Shape
from strata.platform.recipe import ModelSection

DEFAULTS = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def section(config: Config) -> dict[str, Any]:
    config.require("hidden_act", "silu")
    config.require("swiglu_alpha", DEFAULTS["swiglu_alpha"])
    config.require("swiglu_limit", DEFAULTS["swiglu_limit"])
    window = window_by_layer_types(config, config.optional_whole("sliding_window"), lambda layer: layer % 2 == 0)
    architecture = attention_biases(config) | window | {"activation": "clamped_silu", "sinks": True}
    experts, top_k = config.whole("num_local_experts", "num_experts"), config.whole("num_experts_per_tok")
    return decoder(config, architecture, moe={"experts": experts, "top_k": top_k, "bias": True})


def locate(name: str, shape: Shape, section: ModelSection) -> Location:
    match = EXPERT.fullmatch(name)
    if match is None:
        return Location(name.replace(".mlp.gate.", ".mlp.router."), shape)
    assert section.moe
    layer, expert, part, kind = match[1], int(match[2]), match[3], match[4]
    bias = "_bias" if kind == "bias" else ""
    stored = shape[::-1]  # [in, out]
    if part == "down":
        return Location(f"{layer}.down_proj{bias}", (section.moe.experts, *stored), (expert,), transposed=not bias)
    whole = (section.moe.experts, *stored[:-1], 2 * stored[-1])
    every_other = slice(0 if part == "gate" else 1, None, 2)
    index = (expert, every_other) if bias else (expert, slice(None), every_other)
    return Location(f"{layer}.gate_up_proj{bias}", whole, index, transposed=not bias)


FAMILY = Family("gpt_oss", ("GptOssForCausalLM",), DEFAULTS, section, locate)
