"""Sums of narrow values in a wide total."""

import pytest
import torch

from strata.kernels.ops.accumulate import accumulate, reference


@pytest.mark.parametrize("shape", [(7,), (3, 5), (0, 4), (2, 3, 4)])
def test_adds_in_the_totals_format(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    total, values = torch.randn(shape), torch.randn(shape).bfloat16()
    expected = reference(total, values)
    accumulate(total, values)
    assert torch.equal(total, expected)


def test_shapes_may_differ_and_values_may_be_strided() -> None:
    flat, values = torch.zeros(12), torch.arange(12.0).bfloat16().view(3, 4).t()
    accumulate(flat, values)
    assert flat.tolist() == values.flatten().tolist()


def test_a_total_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="as many elements"):
        accumulate(torch.zeros(3), torch.zeros(4).bfloat16())
    with pytest.raises(ValueError, match="contiguous total"):
        accumulate(torch.zeros(3, 4).t(), torch.zeros(4, 3).bfloat16())


def test_operator_is_registered_completely() -> None:
    torch.library.opcheck(torch.ops.strata.accumulate.default, (torch.zeros(5), torch.ones(5).bfloat16()))
