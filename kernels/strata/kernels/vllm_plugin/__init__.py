"""vLLM plugin that runs Strata's kernels, loaded by vLLM into each process of an engine.

Every vLLM on the machine finds this entry point. Unless the environment variable in `switch.py` is set, the plugin registers and
imports nothing. If it is set, the plugin registers an attention backend named CUSTOM and implementations of some layers; an
engine selects them with vLLM's own arguments.
"""

import logging

from strata.kernels.vllm_plugin.switch import PARTS, PROVIDER, SERVED, SWITCH, engine_arguments, environment, switched_on

__all__ = ["PARTS", "PROVIDER", "SERVED", "SWITCH", "engine_arguments", "environment", "register", "switched_on"]


def register() -> None:
    """Plugin entry point. vLLM may call it several times in a process."""
    parts = switched_on()
    if not parts:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        logging.getLogger("vllm.strata").warning(
            "Strata's kernels are disabled: they need NVIDIA GPUs, and vLLM runs on %s. Unset %s, or set serve.kernels: vllm.",
            current_platform.device_name,
            SWITCH,
        )
        return
    if "attention" in parts:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.attention.StrataAttentionBackend")
    if "w4a16_linear" in parts:
        from strata.kernels.vllm_plugin import linear

        linear.register()
    if parts.intersection(("rms_norm", "silu_and_mul", "rotary_embedding")):
        from strata.kernels.vllm_plugin import layers

        layers.register(parts)
