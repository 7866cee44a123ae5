"""Gemma 3, text only: five of six layers slide, with rotary frequencies of their own."""

from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import decoder, window_by_layer_types
from strata.platform.model_families.families import gemma2
from strata.platform.model_families.family import Family
from strata.platform.model_families.rope import parsed

DEFAULTS = gemma2.DEFAULTS | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
MULTIMODAL = "Use a text-only model of this family, with the architecture Gemma3ForCausalLM, such as google/gemma-3-1b-pt."


def section(config: Config) -> dict[str, Any]:
    config.require("attn_logit_softcapping", None)  # transformers ignores it in this family
    period = config.whole("sliding_window_pattern", "_sliding_window_pattern")
    window = window_by_layer_types(config, config.optional_whole("sliding_window"), lambda layer: (layer + 1) % period != 0)
    by_type = config.tree("rope_parameters")
    full = (by_type.get("full_attention") or {}) | config.tree("rope_scaling")
    rotary = parsed(config, full, config.get("rope_theta"))
    sliding = by_type.get("sliding_attention") or {}
    sliding_theta, sliding_scaling = parsed(config, sliding, config.get("rope_local_base_freq"))
    if sliding_scaling:
        config.refuse("rope_parameters.sliding_attention", sliding)
    architecture = gemma2.gemma(config) | {"qk_norm": "head", "sliding_rope_theta": sliding_theta} | window
    return decoder(config, architecture, rotary=rotary)


FAMILY = Family(
    "gemma3",
    ("Gemma3ForCausalLM",),
    DEFAULTS,
    section,
    refused={"Gemma3ForConditionalGeneration": MULTIMODAL},
)
