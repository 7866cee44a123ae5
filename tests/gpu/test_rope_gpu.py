"""rope and rope_ on a GPU: dtypes, head layouts, partial and interleaved rotation, gradients, CUDA graphs."""

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.rope import reference, rope, rope_

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def distance(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def poison() -> None:
    """Fills memory that the next outputs are likely to reuse with NaN."""
    torch.full((2**24,), float("nan"), device="cuda")


def table(tokens: int, half: int, *batch: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(*batch, tokens, half, device="cuda") * 3
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "dtype, shape",
    [
        *((dtype, shape) for dtype in TOLERANCE for shape in ((32, 8, 128, 64), (5, 3, 7, 2))),
        *((torch.bfloat16, shape) for shape in ((1, 1, 2, 1), (3, 1, 96, 48), (14, 2, 64, 16))),
    ],
)
def test_values_and_gradients_equal_the_reference(
    interleaved: bool, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    heads, kv_heads, dim, half = shape
    q, k = (torch.randn(2, 129, count, dim, device="cuda").to(dtype) for count in (heads, kv_heads))
    cos, sin = table(129, half)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    wide = q.double().requires_grad_(), k.double().requires_grad_()
    truth = reference(*wide, cos.double(), sin.double(), interleaved=interleaved)
    poison()
    ours = rope(*leaves, cos, sin, interleaved=interleaved)
    upstream = [torch.randn_like(one) for one in ours]
    poison()
    grads = torch.autograd.grad(ours, leaves, upstream)
    expected = torch.autograd.grad(truth, wide, [one.double() for one in upstream])
    rope_(q, k, cos, sin, interleaved=interleaved)
    for one, theirs in zip((*ours, *grads, q, k), (*truth, *expected, *truth), strict=True):
        assert one.dtype == dtype
        assert distance(one, theirs) < TOLERANCE[dtype]


def test_head_layouts_and_a_table_per_sequence() -> None:
    cos, sin = table(65, 32, 3)
    heads_first = [torch.randn(3, heads, 65, 64, device="cuda").transpose(1, 2) for heads in (6, 2)]
    packed = torch.split(torch.randn(3, 65, 10, 64, device="cuda"), [6, 2, 2], dim=2)[:2]
    columns = [torch.randn(3, 65, 64, heads, device="cuda").transpose(2, 3) for heads in (6, 2)]
    for q, k in (heads_first, packed, columns):
        poison()
        for ours, theirs in zip(rope(q, k, cos, sin), reference(q, k, cos, sin), strict=True):
            assert distance(ours, theirs) < 1e-5


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_positions_in_a_cuda_graph(index: torch.dtype) -> None:
    """A graph is replayed with other positions and values in the same buffers."""
    cos, sin = table(1000, 32)
    qkv = torch.randn(17, 10, 64, device="cuda", dtype=torch.bfloat16)
    positions = torch.zeros(17, dtype=index, device="cuda")
    q, k, _ = torch.split(qkv, [6, 2, 2], dim=1)
    rope_(q, k, cos, sin, positions=positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rope_(q, k, cos, sin, positions=positions)
    qkv.normal_()
    positions.random_(1000)
    before = qkv.clone()
    graph.replay()
    truth = reference(before[None, :, :6], before[None, :, 6:8], cos[positions], sin[positions])
    assert distance(q, truth[0][0]) < 1e-2 and distance(k, truth[1][0]) < 1e-2
    assert torch.equal(qkv[:, 8:], before[:, 8:])


def test_no_tokens() -> None:
    q, k = torch.randn(2, 0, 4, 64, device="cuda"), torch.randn(2, 0, 2, 64, device="cuda")
    assert [one.shape for one in rope(q, k, *table(0, 32))] == [q.shape, k.shape]


def test_compiled_training_step() -> None:
    cos, sin = table(64, 32)

    def step(q: Tensor, k: Tensor) -> Tensor:
        q, k = rope(q, k, cos, sin)
        return (q * k).square().mean()

    inputs = [torch.randn(2, 64, 4, 64, device="cuda", requires_grad=True) for _ in range(2)]
    eager = torch.autograd.grad(step(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True)(*inputs), inputs)
    assert all(distance(ours, theirs) < 1e-5 for ours, theirs in zip(compiled, eager, strict=True))
