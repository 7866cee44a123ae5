"""Our kernels in vLLM's engines: a plugin that vLLM loads into each of their processes, and the switch that wakes it.

Without the switch nothing is registered and nothing is imported, for every vLLM on the machine finds this entry point. With it
vLLM knows an attention backend named CUSTOM and other implementations of some layers; that an engine uses them is said with
vLLM's own arguments. Both come from here, so that they cannot disagree.
"""

import logging
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


def register() -> None:
    """The entry point. vLLM may call it several times in a process."""
    parts = switched_on()
    if not parts:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        logging.getLogger("vllm.strata").warning(
            "Strata's kernels stay off: they are for NVIDIA GPUs, and vLLM runs on %s. Unset %s, or set serve.kernels: vllm.",
            current_platform.device_name,
            SWITCH,
        )
        return
    if "attention" in parts:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.attention.StrataAttentionBackend")
    if parts.intersection(("rms_norm", "silu_and_mul", "rotary_embedding")):
        from strata.kernels.vllm_plugin import layers

        layers.register(parts)
