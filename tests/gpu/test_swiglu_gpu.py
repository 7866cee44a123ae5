"""swiglu on a GPU: dtypes, odd sizes, halves of a packed tensor, gradients."""

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.swiglu import reference, swiglu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def distance(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def poison() -> None:
    """Fills memory that the next outputs are likely to reuse with NaN."""
    torch.full((2**24,), float("nan"), device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (127, 129), (2, 129, 127), (5, 4097), (300, 2048)])
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...], packed: bool) -> None:
    if packed:
        gate, up = torch.randn(*shape[:-1], 2 * shape[-1], device="cuda").to(dtype).chunk(2, dim=-1)
    else:
        gate, up = torch.randn(2, *shape, device="cuda").to(dtype)
    dout = torch.randn(shape, device="cuda").to(dtype)
    leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
    wide = gate.double().requires_grad_(), up.double().requires_grad_()
    truth = reference(*wide)
    poison()
    out = swiglu(*leaves)
    poison()
    grads = torch.autograd.grad(out, leaves, dout)
    expected = torch.autograd.grad(truth, wide, dout.double())
    for ours, theirs in zip((out, *grads), (truth, *expected), strict=True):
        assert ours.dtype == dtype
        assert distance(ours, theirs) < TOLERANCE[dtype]


def test_transposed_empty_and_tall_inputs() -> None:
    gate, up = torch.randn(64, 50, device="cuda").T, torch.randn(50, 64, device="cuda")
    assert distance(swiglu(gate, up), reference(gate.double(), up.double())) < 1e-5
    assert swiglu(gate[:0], up[:0]).shape == (0, 64)
    gate, up = torch.randn(70000, 16, device="cuda").chunk(2, dim=-1)
    assert distance(swiglu(gate, up), reference(gate.double(), up.double())) < 1e-5


def test_more_elements_than_32_bit_indices() -> None:
    gate = torch.empty(2**31 + 5, device="cuda", dtype=torch.bfloat16).normal_()
    assert distance(swiglu(gate, gate)[-7:], reference(gate[-7:].double(), gate[-7:].double())) < 1e-2


def test_compiled_training_step() -> None:
    def step(packed: Tensor) -> Tensor:
        return swiglu(*packed.chunk(2, dim=-1)).square().mean()

    packed = torch.randn(64, 256, device="cuda", requires_grad=True)
    eager, compiled = (torch.autograd.grad(run(packed), packed)[0] for run in (step, torch.compile(step, fullgraph=True)))
    assert distance(compiled, eager) < 1e-5
