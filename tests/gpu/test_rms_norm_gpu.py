"""rms_norm and add_rms_norm on a GPU: dtypes, odd and wide rows, gradients, and bitwise reproducibility."""

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.rms_norm.rms_norm import add_rms_norm, reference, rms_norm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def distance(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def poison() -> None:
    """Fills memory that the next outputs are likely to reuse with NaN."""
    torch.full((2**24,), float("nan"), device="cuda")


def gradients(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    return torch.autograd.grad(reference(x, weight, EPS), (x, weight), dy.double())


@pytest.mark.parametrize(
    "dtype, rows, width",
    [
        *((dtype, rows, width) for dtype in TOLERANCE for rows, width in ((3, 3), (127, 129), (257, 4097))),
        *((torch.bfloat16, rows, width) for rows, width in ((1, 1), (129, 127), (1000, 64), (300, 1024))),
    ],
)
def test_equals_the_reference(dtype: torch.dtype, rows: int, width: int) -> None:
    x, dy, weight = drawn(rows, width, dtype=dtype), drawn(rows, width, dtype=dtype), drawn(width, dtype=dtype)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    poison()
    y = rms_norm(*leaves, EPS)
    poison()
    dx, dweight = torch.autograd.grad(y, leaves, dy)
    assert distance(y, reference(x.double(), weight.double(), EPS)) < TOLERANCE[dtype]
    if width > 1:  # x over its own magnitude is its sign: the gradient is only rounding error
        truth = gradients(x, weight, dy)
        assert distance(dx, truth[0]) < TOLERANCE[dtype]
        assert distance(dweight, truth[1]) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "width, weight_dtype", [(4096, torch.bfloat16), (8192, torch.float32), (16384, torch.bfloat16), (65536, torch.float32)]
)
def test_wide_rows_with_a_residual_in_bf16(width: int, weight_dtype: torch.dtype) -> None:
    x, residual, dy, dsum = (drawn(600, width, dtype=torch.bfloat16) for _ in range(4))
    weight = drawn(width, dtype=weight_dtype)
    leaves = [one.clone().requires_grad_() for one in (x, residual, weight)]
    poison()
    y, total = add_rms_norm(leaves[0], leaves[1], leaves[2], EPS)
    poison()
    dx, dresidual, dweight = torch.autograd.grad((y, total), leaves, (dy, dsum))
    assert y.dtype == dx.dtype == torch.bfloat16 and dweight.dtype == weight_dtype
    assert torch.equal(total, x + residual) and torch.equal(dx, dresidual)
    assert distance(y, reference(total.double(), weight.double(), EPS)) < 1e-2
    truth = gradients(total, weight, dy)
    assert distance(dx, truth[0] + dsum.double()) < 1e-2
    assert distance(dweight, truth[1]) < (1e-5 if weight_dtype == torch.float32 else 1e-2)


def test_weight_gradient_is_bitwise_reproducible() -> None:
    x, dy, weight = drawn(5000, 1024, dtype=torch.bfloat16), drawn(5000, 1024, dtype=torch.bfloat16), drawn(1024)
    leaves = x.requires_grad_(), weight.requires_grad_()
    first, second = (torch.autograd.grad(rms_norm(*leaves, EPS), leaves, dy) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_strided_rows_and_transposed_input() -> None:
    weight = drawn(512)
    for x in (drawn(40, 700)[:, 100:612], drawn(512, 40).T, drawn(8, 5, 512).transpose(0, 1)):
        assert distance(rms_norm(x, weight, EPS), reference(x.double(), weight.double(), EPS)) < 1e-5
        dy = drawn(*x.shape).expand_as(x)
        ours = torch.autograd.grad(rms_norm(x.requires_grad_(), weight, EPS), x, dy)[0]
        assert distance(ours, gradients(x.detach(), weight, dy)[0]) < 1e-5


def test_no_rows_and_large_values_in_fp16() -> None:
    assert rms_norm(drawn(0, 64), drawn(64), EPS).shape == (0, 64)
    x = torch.full((3, 4096), 6e4, device="cuda", dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones_like(x[0]), EPS), torch.ones_like(x))


def test_more_elements_than_32_bit_indices() -> None:
    x = torch.empty(2**31 // 4096 + 3, 4096, device="cuda", dtype=torch.bfloat16).normal_()
    weight = drawn(4096, dtype=torch.bfloat16)
    y = rms_norm(x, weight, EPS)
    assert distance(y[-3:], reference(x[-3:].double(), weight.double(), EPS)) < 1e-2


def test_compiled_training_step() -> None:
    def step(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y, total = add_rms_norm(x, residual, weight, EPS)
        return (rms_norm(total, weight, EPS) * y).float().square().mean()

    inputs = [drawn(64, 256, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    inputs.append(drawn(256, dtype=torch.bfloat16).requires_grad_())
    eager = torch.autograd.grad(step(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True)(*inputs), inputs)
    assert all(distance(ours, theirs) < 1e-2 for ours, theirs in zip(compiled, eager, strict=True))
