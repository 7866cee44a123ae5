"""Projections of one input, fused."""

import pytest
import torch
from torch import nn

from strata.training.model.projections import Projecting, fuse, projected


class Two(Projecting):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6, bias=bias), nn.Linear(8, 4, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = projected(self, x, self.first, self.second)
        return one.square().sum() + two.sin().sum()


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (0, 8)])
def test_values_and_gradients_equal_separate_layers(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = Two().double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    loss = layer(x)
    expected = torch.autograd.grad(loss, [x, *layer.parameters()])
    fuse(layer)
    assert layer.fused
    found = torch.autograd.grad(layer(x), [x, *layer.parameters()])
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_frozen_weights_get_no_gradient() -> None:
    layer, x = Two(), torch.randn(3, 8)
    fuse(layer)
    layer.first.weight.requires_grad_(False)
    layer(x).backward()
    assert layer.first.weight.grad is None and layer.second.weight.grad is not None


def test_layers_with_a_bias_or_a_replacement_are_called() -> None:
    calls: list[nn.Module] = []
    layer = Two(bias=True)
    fuse(layer)
    layer.second.register_forward_hook(lambda module, *_: calls.append(module))
    layer(torch.randn(3, 8)).backward()
    assert calls == [layer.second] and layer.second.bias.grad is not None


def test_compiled_layers_stay_one_graph() -> None:
    layer, x = Two(), torch.randn(3, 8, requires_grad=True)
    expected = torch.autograd.grad(layer(x), [x, *layer.parameters()])
    fuse(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x), [x, *layer.parameters()])
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)
