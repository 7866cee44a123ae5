"""Engines that are compared: a format of weights, and the kernels that multiply with them. Light: the command line imports it."""

from dataclasses import dataclass
from typing import Any

from strata.kernels import vllm_plugin
from strata.kernels.vllm_plugin.switch import WITHOUT, engine_arguments
from strata.platform.errors import UserError, shown

OURS = "w4a16-strata"  # Strata's kernel for these weights alone; `-served` are with the kernels of Strata's engines
BASE = "bf16"


@dataclass(frozen=True)
class Contender:
    name: str
    preset: str | None  # name of the scheme in compressed-tensors; None: weights of 16 bits
    without: str = ""  # kernels of vLLM
    ours: tuple[str, ...] = ()  # parts of the plugin
    needs_gpu: bool = False
    kv_cache: str = "auto"

    @property
    def environment(self) -> dict[str, str]:
        return ({WITHOUT: self.without} if self.without else {}) | (vllm_plugin.environment(self.ours) if self.ours else {})

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's engine."""
        return {"kv_cache_dtype": self.kv_cache} | engine_arguments(self.ours)

    def obstacle(self, gpu: bool) -> str | None:
        return "its kernel needs an NVIDIA GPU" if self.needs_gpu and not gpu else None


CONTENDERS = {
    each.name: each
    for each in (
        Contender(BASE, None),
        Contender("bf16-served", None, ours=vllm_plugin.SERVED, needs_gpu=True),
        Contender("w4a16", "W4A16"),  # vLLM's choice, Machete on Hopper
        Contender("w4a16-marlin", "W4A16", without="MacheteLinearKernel,AllSparkLinearKernel", needs_gpu=True),
        Contender(OURS, "W4A16", ours=("w4a16_linear",), needs_gpu=True),
        Contender("w4a16-served", "W4A16", ours=("w4a16_linear", *vllm_plugin.SERVED), needs_gpu=True),
        Contender("fp8", "FP8_DYNAMIC"),  # a scale for each output channel, and for each token of activations
        Contender("fp8-kv", "FP8_DYNAMIC", needs_gpu=True, kv_cache="fp8"),
        Contender("fp8-served", "FP8_DYNAMIC", ours=vllm_plugin.SERVED, needs_gpu=True, kv_cache="fp8"),
    )
}
PEERS = ("w4a16", "w4a16-marlin")  # of Strata's kernel


def named(name: str) -> Contender:
    if name not in CONTENDERS:
        raise UserError(f"--contenders has {shown(name)}, which is none.", f"Use some of {', '.join(CONTENDERS)}.")
    return CONTENDERS[name]
