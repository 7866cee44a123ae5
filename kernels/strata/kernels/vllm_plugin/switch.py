"""The environment variable that turns the plugin on, and the engine arguments that go with it.

Both come from here, so that they cannot disagree.
"""

import os
from collections.abc import Collection
from typing import Any

SWITCH = "STRATA_VLLM_KERNELS"  # in the environment of an engine's processes: the parts that are on, with commas
PROVIDER = "strata"  # our name among the implementations of vLLM's RMSNorm

# `flash_prefill` gives whole prompts to flash_attention, which need not look into the paged cache; the last three are layers, of
# which the rotary embedding is for eager engines.
PARTS = ("attention", "flash_prefill", "rms_norm", "silu_and_mul", "rotary_embedding")
SERVED = ("attention", "flash_prefill")


def environment(parts: Collection[str] = SERVED) -> dict[str, str]:
    return {SWITCH: ",".join(parts)}


def engine_arguments(parts: Collection[str] = SERVED, largest_graph: int | None = None) -> dict[str, Any]:
    """vLLM's, beside that environment. Steps of up to `largest_graph` tokens are CUDA graphs; without it vLLM says how many."""
    arguments: dict[str, Any] = {}
    compiled: dict[str, Any] = {}
    if "attention" in parts:
        arguments["attention_backend"] = "CUSTOM"
        compiled["cudagraph_mode"] = "FULL"  # for steps with prompts in them too, which vLLM would launch layer by layer
    if largest_graph is not None:
        compiled["max_cudagraph_capture_size"] = largest_graph
    if "rms_norm" in parts:
        arguments["ir_op_priority"] = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}
    if "silu_and_mul" in parts:
        # In a model that it compiles vLLM leaves this to Inductor, unless it is told otherwise; the rotary embedding too, and
        # that stays so, for ours turns queries and keys in place, and a compiled graph would copy them first.
        compiled["custom_ops"] = ["+silu_and_mul"]
    return arguments | ({"compilation_config": compiled} if compiled else {})


def switched_on() -> frozenset[str]:
    found = frozenset(filter(None, os.environ.get(SWITCH, "").split(",")))
    if unknown := found.difference(PARTS):
        raise ValueError(f"{SWITCH} names {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return found
