"""Rotary embedding of a config.json: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of version 4."""

import math
from typing import Any

from strata.platform.model_families.config import Config

Tree = dict[str, Any]
Rotary = tuple[float, Tree | None]  # base of the frequencies, and the tree of a `RopeScalingSection`

KINDS = ("default", "linear", "llama3", "yarn", "dynamic")


def rope(config: Config) -> Rotary:
    parameters = config.tree("rope_scaling") or config.tree("rope_parameters")
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        parameters = config.defaults.get("rope_parameters", {})
    for key, value in parameters.items():
        if isinstance(value, dict):  # by layer type, which only Gemma 3 reads
            config.refuse(f"rope_parameters.{key}", value)
    return parsed(config, parameters, config.get("rope_theta"))


def parsed(config: Config, parameters: Tree, theta: object) -> Rotary:
    """`theta` counts where `parameters` has none."""
    outer = {key: config.values[key] for key in ("original_max_position_embeddings",) if key in config.values}
    given = Config({"rope_theta": theta} | parameters | outer, config.where, {"rope_type": "default", "truncate": True})
    kind = given.get("rope_type", "type")
    if kind not in KINDS:
        given.refuse("rope_type", kind)
    for partial in (given.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if partial not in (None, 1):
            given.refuse("partial_rotary_factor", partial)
    return given.number("rope_theta"), _scaling(config, given, kind)


def _scaling(config: Config, given: Config, kind: str) -> Tree | None:
    if kind in ("default", "dynamic"):  # dynamic changes nothing up to max_position_embeddings, the longest context here
        return None
    if kind == "linear":
        return {"kind": kind, "factor": given.number("factor")}
    longest = config.whole("max_position_embeddings")
    original = given.optional_whole("original_max_position_embeddings") or longest
    if kind == "llama3":
        return {
            "kind": kind,
            "factor": given.number("factor"),
            "original_context": original,
            "low_frequency_factor": given.number("low_freq_factor"),
            "high_frequency_factor": given.number("high_freq_factor"),
        }
    factor = given.optional_number("factor") or longest / original
    return {
        "kind": kind,
        "factor": factor,
        "original_context": original,
        "beta_fast": given.optional_number("beta_fast") or 32.0,
        "beta_slow": given.optional_number("beta_slow") or 1.0,
        "truncate": given.flag("truncate"),
        "attention_factor": given.optional_number("attention_factor") or _attention_factor(given, factor),
    }


def _attention_factor(given: Config, factor: float) -> float | None:
    """DeepSeek's form of yarn's factor; None for the usual one."""
    if not given.get("mscale") or not given.get("mscale_all_dim"):
        return None
    logarithm = 0.1 * math.log(factor)
    return (given.number("mscale") * logarithm + 1) / (given.number("mscale_all_dim") * logarithm + 1)
