"""Our kernels in vLLM's engines: a plugin that vLLM loads into each of their processes.

Without the switch (`switch.py`) nothing is registered and nothing is imported, for every vLLM on the machine finds this entry
point. With it vLLM knows an attention backend named CUSTOM and other implementations of some layers; that an engine uses them
is said with vLLM's own arguments.
"""

import logging

from strata.kernels.vllm_plugin.switch import PARTS, PROVIDER, SERVED, SWITCH, engine_arguments, environment, switched_on

__all__ = ["PARTS", "PROVIDER", "SERVED", "SWITCH", "engine_arguments", "environment", "register", "switched_on"]


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
