"""The product with its activation in one operator."""

import pytest
import torch

from strata.kernels.ops.linear_gelu import linear_gelu, reference


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 4, 8), (0, 8)])
def test_shapes_and_values(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), torch.randn(6, 8), torch.randn(6)
    found = linear_gelu(x, weight, bias)
    product = x.double() @ weight.double().T + bias.double()
    cubic = torch.tanh((2 / torch.pi) ** 0.5 * (product + 0.044715 * product**3))
    assert found.shape == (*shape[:-1], 6)
    assert torch.allclose(found.double(), product / 2 * (1 + cubic), atol=1e-5)
    assert torch.equal(found, reference(x, weight, bias))


def test_the_compiler_keeps_the_operator() -> None:
    inputs = (torch.randn(3, 8), torch.randn(6, 8), torch.randn(6))
    torch.library.opcheck(torch.ops.strata.linear_gelu.default, inputs)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(linear_gelu, backend=backend, fullgraph=True)(*inputs)
    assert any("linear_gelu" in str(node.target) for node in graphs[0].graph.nodes)
