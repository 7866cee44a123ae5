"""Tokens without an adapter beside tokens with one, in vLLM's CPU operations."""

import pytest
import torch

from strata.serving.vllm_patches import lora_base


def shrunk() -> torch.Tensor:
    from vllm.lora.ops.torch_ops import lora_ops

    output = torch.zeros(2, 3)
    lora_ops.bgmv_shrink(torch.ones(2, 4), torch.ones(2, 1, 3, 4), output, torch.tensor([0, -1]))
    return output


@pytest.mark.slow
def test_a_token_without_an_adapter_gets_none() -> None:
    from vllm.lora.ops.torch_ops import lora_ops

    if not hasattr(lora_ops.bgmv_shrink, "__wrapped__"):
        assert shrunk()[1].any(), "vLLM skips negative indices now: the patch is no longer needed"
    lora_base.install()
    assert torch.equal(shrunk(), torch.tensor([[4.0] * 3, [0.0] * 3]))
