"""Gradient of an input that several projections read."""

import pytest
import torch

from strata.kernels.ops.input_gradient import input_gradient, reference


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("widths", [(6,), (6, 4), (6, 2, 2)])
def test_sums_equal_the_reference(tokens: int, widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    doutputs = [torch.randn(tokens, width, dtype=torch.float64) for width in widths]
    weights = [torch.randn(width, 5, dtype=torch.float64) for width in widths]
    before = [doutput.clone() for doutput in doutputs]
    torch.testing.assert_close(input_gradient(doutputs, weights), reference(doutputs, weights))
    assert all(map(torch.equal, before, doutputs))


def test_operator_is_registered_completely() -> None:
    inputs = (torch.randn(3, 4), [torch.randn(3, 2)], [torch.randn(4, 5), torch.randn(2, 5)])
    torch.library.opcheck(torch.ops.strata.input_gradient.default, inputs)
