"""Extension of vLLM's worker that fills a loaded model with random numbers.

vLLM's own random weights are mostly zeros in fp8 and uninitialized memory in 4 bits. A GPU draws less power for zeros, and then
runs at a higher clock.

The worker imports this module before it builds the model, so Strata's kernels are registered here for a machine without the
entry point of the plugin.
"""

import math

import torch

from strata.kernels import vllm_plugin

vllm_plugin.register()

STD = 0.02  # of all weights
CODE_STD = math.sqrt((16**2 - 1) / 12)  # of 4-bit numbers
FP8_STD = 100.0  # of fp8 numbers, which end at 448
PACKED, SCALE = ".weight_packed", ".weight_scale"


class RandomWeights:
    """Mixed into vLLM's worker, whose `get_model` it calls."""

    def fill_with_random_numbers(self) -> None:
        fill(self.get_model())  # type: ignore[attr-defined]


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """In place: CUDA graphs hold the addresses. Packed weights are random in every layout, so the kernel's does not matter."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        values, dtype = parameter.data, parameter.dtype
        if name.endswith(PACKED):
            values.random_(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        elif name.endswith(SCALE):
            values.fill_(STD / (CODE_STD if name.removesuffix(SCALE) + PACKED in parameters else FP8_STD))
        elif dtype == torch.float8_e4m3fn:
            drawn = torch.randn(values.shape, device=values.device) * FP8_STD
            values.copy_(drawn.clamp_(-448, 448))
        elif dtype.is_floating_point:
            values.normal_(0, STD) if values.dim() > 1 else values.fill_(1)
