"""Sums of bf16 gradients in fp32 by the kernel."""

import pytest
import torch

from strata.kernels.ops.accumulate import accumulate, reference


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 10_000_003])
def test_values(size: int) -> None:
    torch.manual_seed(0)
    total, values = torch.randn(size + 1, device="cuda")[1:], torch.randn(size, device="cuda").bfloat16()
    expected = reference(total, values)
    accumulate(total, values)
    assert torch.equal(total, expected)
