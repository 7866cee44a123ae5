"""Computes requests without an adapter without one, beside requests with adapters on CPUs.

A token without an adapter has the index -1. vLLM's CPU operations use it to index the adapters' weights, so the token gets the
adapter in the last slot. The product with the first matrix is set to zero for such tokens, and with it that of the second.

Written for vLLM 0.29. No longer needed when `vllm.lora.ops.torch_ops` skips negative indices; the test of this file fails then.
"""

import functools

import torch


def install() -> None:
    """Entry point of the plugin, which vLLM loads in its engines' processes."""
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    if hasattr(lora_ops.bgmv_shrink, "__wrapped__"):
        return
    original = lora_ops.bgmv_shrink

    @functools.wraps(original)
    def bgmv_shrink(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        has_adapter = (indices >= 0).to(inputs.dtype).unsqueeze(1)  # [tokens, 1]
        original(inputs * has_adapter, weights, output, indices, scaling)

    # `sgmv_shrink` calls that of the first module.
    lora_ops.bgmv_shrink = torch_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink
