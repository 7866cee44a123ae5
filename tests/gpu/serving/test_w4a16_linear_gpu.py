"""w4a16_linear on a GPU: token counts, groups, zero points, dtypes, all launch configurations, CUDA graphs."""

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.w4a16_linear.kernel import candidates, size_class, token_tile, w4a16_linear_triton
from strata.kernels.ops.w4a16_linear.packing import PackedWeight, pack, unpack
from strata.kernels.ops.w4a16_linear.w4a16_linear import random_weight, w4a16_linear
from strata.kernels.tuning.tunable import architecture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 4e-3}
CUDA = torch.device("cuda")


def distance(x: Tensor, weight: PackedWeight, out: Tensor, bias: Tensor | None = None) -> float:
    truth = x.double() @ unpack(weight, x.shape[-1]).double().T
    truth = truth if bias is None else truth + bias.double()
    return float((out.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17, 33, 100, 300])
@pytest.mark.parametrize("inputs, outputs, group", [(4096, 4096, 128), (2048, 1032, 32), (1088, 4104, 64), (896, 128, 896)])
def test_equals_the_reference(dtype: torch.dtype, symmetric: bool, tokens: int, inputs: int, outputs: int, group: int) -> None:
    weight = random_weight(inputs, outputs, group, CUDA, dtype, symmetric)
    x, bias = torch.randn(tokens, inputs, device=CUDA).to(dtype), torch.randn(outputs, device=CUDA).to(dtype)
    torch.full((2**24,), float("nan"), device=CUDA)  # memory that the outputs are likely to reuse
    assert distance(x, weight, w4a16_linear(x, *weight)) < TOLERANCE[dtype]
    assert distance(x, weight, w4a16_linear(x, *weight, bias=bias), bias) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_weight_is_read_at_its_place(dtype: torch.dtype) -> None:
    """Rows of the identity select single columns of the weight. Exact, zero points of 16 included."""
    nibbles = torch.randint(0, 16, (2048, 264), device=CUDA)
    zeros = torch.randint(0, 17, (16, 264), device=CUDA)
    weight = pack(nibbles, torch.ones(16, 264, device=CUDA, dtype=dtype), zeros)
    for start in range(0, 2048, 16):
        x = torch.zeros(16, 2048, device=CUDA, dtype=dtype)
        x[torch.arange(16), start + torch.arange(16)] = 1
        expected = (nibbles - zeros.repeat_interleave(128, 0))[start : start + 16]
        assert torch.equal(w4a16_linear(x, *weight).long(), expected)


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_every_launch_configuration(tokens: int) -> None:
    weight = random_weight(2048, 2048, 128, CUDA, symmetric=False)
    x = torch.randn(tokens, 2048, device=CUDA, dtype=torch.bfloat16)
    for candidate in candidates(architecture(CUDA), (token_tile(tokens), *size_class(2048, 2048))):
        assert distance(x, weight, w4a16_linear_triton(x, *weight, None, candidate.arguments())) < 4e-3, candidate


def test_runs_are_equal_bit_for_bit() -> None:
    """Partial sums are added in a fixed order."""
    weight = random_weight(8192, 1024, 128, CUDA)
    x = torch.randn(3, 8192, device=CUDA, dtype=torch.bfloat16)
    first = w4a16_linear(x, *weight)
    assert all(torch.equal(w4a16_linear(x, *weight), first) for _ in range(20))


def test_in_a_cuda_graph() -> None:
    weight = random_weight(4096, 512, 128, CUDA)
    x = torch.randn(4, 4096, device=CUDA, dtype=torch.bfloat16)
    w4a16_linear(x, *weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = w4a16_linear(x, *weight)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert distance(x, weight, out) < 4e-3


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_chain_in_two_cuda_graphs(tokens: int) -> None:
    """Launches start before the kernel in front of them has ended, and every launch of a graph has its own arrival counters."""
    layers = [random_weight(2048, 2048, 128, CUDA) for _ in range(12)]
    x = torch.randn(tokens, 2048, device=CUDA, dtype=torch.bfloat16)

    def chain() -> Tensor:
        out = x
        for weight in layers:
            out = w4a16_linear(w4a16_linear(out, *weight) * 0.5 + out, *weight)
            out = out / out.float().norm() * 45
        return out

    expected = chain()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    outs = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outs.append(chain())
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
