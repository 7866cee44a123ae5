"""w4a16_linear behind vLLM's linear layers with 4-bit weights: GPTQ, AWQ and compressed-tensors checkpoints.

vLLM selects the first kernel of a list that implements a layer, and a plugin may add to its end. An engine therefore runs this
kernel if vLLM's own are disabled, which `switch.environment` does. Weights are repacked once, after loading.
"""

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.parameter import permute_param_layout_
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from strata.kernels.ops.w4a16_linear import w4a16_linear  # noqa: F401 defines torch.ops.strata.w4a16_linear
from strata.kernels.ops.w4a16_linear.kernel import CHUNK
from strata.kernels.ops.w4a16_linear.packing import GROUPS, pack_gptq

SYMMETRIC, WITH_ZEROS = scalar_types.uint4b8, scalar_types.uint4
ZEROS_OF_WORD = 8
MOST_WEIGHTS = 2**33  # the kernel's offsets are 32 bits
LEAST_CAPABILITY = 80


def register() -> None:
    """vLLM may load a plugin twice."""
    if not StrataW4A16LinearKernel.registered:
        register_linear_kernel(StrataW4A16LinearKernel, PlatformEnum.CUDA)
        StrataW4A16LinearKernel.registered = True


class StrataW4A16LinearKernel(MPLinearKernel):  # type: ignore[misc]
    registered = False

    @classmethod
    def get_min_capability(cls) -> int:
        return LEAST_CAPABILITY

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        reason = _obstacle(c)
        return reason is None, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight, scales, zeros, _ = self._get_weight_params(layer)
        permute_param_layout_(weight, input_dim=0, output_dim=1, packed_dim=0)
        permute_param_layout_(scales, input_dim=0, output_dim=1)
        by_group = zeros.data.t() if self.config.zero_points else None  # vLLM packs the zero points of eight outputs in a word
        packed = pack_gptq(weight.data, scales.data.to(self.config.act_type), by_group, zero_offset=0)
        replace_parameter(layer, self.w_q_name, packed.packed)
        replace_parameter(layer, self.w_s_name, packed.scales)
        if packed.zeros is not None:
            replace_parameter(layer, self.w_zp_name, packed.zeros)

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scales, zeros, _ = self._get_weight_params(layer)
        zeros = zeros if self.config.zero_points else None  # GPTQ layers have a parameter of zero points that is not used
        return torch.ops.strata.w4a16_linear(x, weight, scales, zeros, bias)  # type: ignore[no-any-return]


def _obstacle(c: MPLinearLayerConfig) -> str | None:
    inputs, outputs = c.partition_weight_shape
    if c.weight_type != (WITH_ZEROS if c.zero_points else SYMMETRIC):
        points = "with" if c.zero_points else "without"
        return f"w4a16_linear supports {WITH_ZEROS} with zero points and {SYMMETRIC}, got {c.weight_type} {points} zero points"
    if c.act_type not in (torch.bfloat16, torch.float16):
        return f"w4a16_linear supports bfloat16 and float16 activations, got {c.act_type}"
    if c.has_g_idx:
        return "w4a16_linear supports groups of consecutive inputs, not those of activation order"
    if c.group_size != -1 and c.group_size not in GROUPS and c.group_size % CHUNK:
        return f"w4a16_linear supports groups of 32, 64 or a multiple of 128 inputs, got {c.group_size}"
    if c.group_size != -1 and inputs % c.group_size:
        return f"the {inputs} inputs of a GPU are not whole groups of {c.group_size}"
    if c.zero_points and outputs % ZEROS_OF_WORD:
        return f"zero points are packed by {ZEROS_OF_WORD} outputs, got {outputs} outputs"
    if inputs * outputs >= MOST_WEIGHTS:
        return f"w4a16_linear supports fewer than 2**33 weights, got {inputs * outputs}"
    return None
