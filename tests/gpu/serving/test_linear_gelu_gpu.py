"""The product with its activation, computed by cuBLASLt."""

import pytest
import torch

from strata.kernels.ops.linear_gelu import linear_gelu, reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("shape", "width"), [((4096, 1152), 4608), ((2, 1000, 72), 40), ((1, 3072), 3072)])
def test_values(shape: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    weight = torch.randn(width, shape[-1], device="cuda", dtype=dtype) / shape[-1] ** 0.5
    bias = torch.randn(width, device="cuda", dtype=dtype)
    truth = reference(x.double(), weight.double(), bias.double())
    found = linear_gelu(x, weight, bias)
    assert found.shape == truth.shape and found.dtype == dtype
    assert float((found.double() - truth).norm() / truth.norm()) < {torch.float32: 1e-3}.get(dtype, 5e-3)
