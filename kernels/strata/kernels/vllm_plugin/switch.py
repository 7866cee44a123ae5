"""Environment variable that enables the plugin, and the matching engine arguments.

Both are defined here so that they cannot disagree.
"""

import os
from collections.abc import Collection
from typing import Any

SWITCH = "STRATA_VLLM_KERNELS"  # in the environment of the engine's processes: enabled parts, comma-separated
PROVIDER = "strata"  # name of our implementation of vLLM's RMSNorm

# `flash_prefill` sends uncached prompts to flash_attention, which does not read the paged cache. `w4a16_linear` is for models of
# 4-bit weights. The last three are layers; the rotary embedding is only for eager engines.
PARTS = ("attention", "flash_prefill", "w4a16_linear", "rms_norm", "silu_and_mul", "rotary_embedding")
SERVED = ("attention", "flash_prefill")

# vLLM's kernels for 4-bit weights, which it would select before a plugin's.
WITHOUT = "VLLM_DISABLED_KERNELS"
BEFORE_OURS = (
    "MacheteLinearKernel",
    "AllSparkLinearKernel",
    "MarlinLinearKernel",
    "ConchLinearKernel",
    "ExllamaLinearKernel",
    "TritonW4A16LinearKernel",
    "HummingLinearKernel",
)


def environment(parts: Collection[str] = SERVED) -> dict[str, str]:
    """With `w4a16_linear`, an engine refuses weights of 4 or 8 bits that Strata's kernel does not support."""
    return {SWITCH: ",".join(parts)} | ({WITHOUT: ",".join(BEFORE_OURS)} if "w4a16_linear" in parts else {})


def engine_arguments(parts: Collection[str] = SERVED, largest_graph: int | None = None) -> dict[str, Any]:
    """vLLM engine arguments for that environment. Steps of up to `largest_graph` tokens run as CUDA graphs (default: vLLM's)."""
    arguments: dict[str, Any] = {}
    compiled: dict[str, Any] = {}
    if "attention" in parts:
        arguments["attention_backend"] = "CUSTOM"
        compiled["cudagraph_mode"] = "FULL"  # also for steps with prompts, which vLLM would launch layer by layer
    if largest_graph is not None:
        compiled["max_cudagraph_capture_size"] = largest_graph
    if "rms_norm" in parts:
        arguments["ir_op_priority"] = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}
    if "silu_and_mul" in parts:
        # In a compiled model, vLLM leaves this layer to Inductor by default. It also leaves the rotary embedding to Inductor,
        # which we keep: our kernel works in place, and a compiled graph would copy queries and keys first.
        compiled["custom_ops"] = ["+silu_and_mul"]
    return arguments | ({"compilation_config": compiled} if compiled else {})


def switched_on() -> frozenset[str]:
    found = frozenset(filter(None, os.environ.get(SWITCH, "").split(",")))
    if unknown := found.difference(PARTS):
        raise ValueError(f"{SWITCH} has unknown parts {', '.join(sorted(unknown))}; use {', '.join(PARTS)}")
    return found
