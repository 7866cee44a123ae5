"""rms_norm and add_rms_norm: the CPU implementation and the interpreted Triton kernels against the reference in fp64."""

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.rms_norm.backward import rms_norm_backward_cpu, rms_norm_backward_triton
from strata.kernels.ops.rms_norm.rms_norm import (
    add_rms_norm,
    add_rms_norm_cpu,
    add_rms_norm_triton,
    reference,
    rms_norm,
    rms_norm_cpu,
    rms_norm_triton,
)

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the compiled kernels")


def distance(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def gradients(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    return torch.autograd.grad(reference(x, weight, EPS), (x, weight), dy.double())


BOTH = [pytest.param("cpu"), pytest.param("triton", marks=interpreted)]
FORWARD = {"cpu": rms_norm_cpu, "triton": rms_norm_triton}
FORWARD_OF_SUM = {"cpu": add_rms_norm_cpu, "triton": add_rms_norm_triton}
BACKWARD = {"cpu": rms_norm_backward_cpu, "triton": rms_norm_backward_triton}


@pytest.mark.slow
@pytest.mark.parametrize("code", BOTH)
@pytest.mark.parametrize(
    "dtype, rows, width",
    [
        *((dtype, rows, width) for dtype in TOLERANCE for rows, width in ((1, 1), (3, 3), (5, 127), (7, 129), (9, 256))),
        (torch.float32, 2, 4097),
    ],
)
def test_forward_and_backward_equal_the_reference(code: str, dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(width)
    x, dy, weight = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    y, rstd = FORWARD[code](x, weight, EPS)
    dx, dweight = BACKWARD[code](dy, None, x, weight, rstd)
    assert y.dtype == dx.dtype == dweight.dtype == dtype and rstd.dtype == torch.float32
    assert distance(y, reference(x.double(), weight.double(), EPS)) < TOLERANCE[dtype]
    if width == 1:
        return  # x over its own magnitude is its sign: the gradient is only rounding error
    truth = gradients(x, weight, dy)
    assert distance(dx, truth[0]) < TOLERANCE[dtype]
    assert distance(dweight, truth[1]) < TOLERANCE[dtype]


@pytest.mark.parametrize("code", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sum_is_rounded_once_and_its_gradient_is_added(code: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, dy, dsum = (torch.randn(4, 3, 200).to(dtype) for _ in range(4))
    weight = torch.randn(200)
    y, total, rstd = FORWARD_OF_SUM[code](x, residual, weight, EPS)
    assert y.dtype == dtype
    assert torch.equal(total, x + residual)
    assert distance(y, reference(total.double(), weight.double(), EPS)) < TOLERANCE[dtype]
    dx, dweight = BACKWARD[code](dy, dsum, total, weight, rstd)
    truth = gradients(total, weight, dy)
    assert dx.dtype == dtype and dweight.dtype == torch.float32
    assert distance(dx, truth[0] + dsum.double()) < TOLERANCE[dtype]
    assert distance(dweight, truth[1]) < 1e-5


@interpreted
@pytest.mark.parametrize("reload", [0, 1])
def test_backward_with_rows_in_registers_and_reloaded(reload: int) -> None:
    torch.manual_seed(0)
    x, dy, dsum, weight = torch.randn(21, 33), torch.randn(21, 33), torch.randn(21, 33), torch.randn(33)
    chosen = {"BLOCK_ROWS": 2, "PREFETCH": 1, "RELOAD": reload, "PROGRAMS_PER_SM": 1, "num_warps": 4}
    _, rstd = rms_norm_triton(x, weight, EPS)
    dx, dweight = rms_norm_backward_triton(dy, dsum, x, weight, rstd, chosen)
    truth = gradients(x, weight, dy)
    assert distance(dx, truth[0] + dsum) < 1e-5 and distance(dweight, truth[1]) < 1e-5
    assert torch.equal(dweight, rms_norm_backward_triton(dy, dsum, x, weight, rstd, chosen)[1])


@pytest.mark.parametrize("code", BOTH)
def test_strided_rows_and_rows_that_need_a_copy(code: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24)
    for x in (torch.randn(5, 40)[:, 8:32], torch.randn(24, 5).T, torch.randn(4, 6, 24).transpose(0, 1)):
        residual, dy = torch.randn(x.T.shape).T if x.dim() == 2 else torch.randn(x.shape), torch.randn(2, *x.shape)[1]
        y, rstd = FORWARD[code](x, weight, EPS)
        assert torch.equal(y, FORWARD[code](x.contiguous(), weight, EPS)[0])
        total = FORWARD_OF_SUM[code](x, residual, weight, EPS)
        assert all(map(torch.equal, total, FORWARD_OF_SUM[code](x.contiguous(), residual.contiguous(), weight, EPS)))
        grads = BACKWARD[code](dy, residual, x, weight, rstd)
        assert all(map(torch.equal, grads, BACKWARD[code](dy, residual.contiguous(), x.contiguous(), weight, rstd)))


@pytest.mark.parametrize("code", BOTH)
def test_no_rows(code: str) -> None:
    x, weight = torch.randn(2, 0, 16), torch.randn(16)
    y, rstd = FORWARD[code](x, weight, EPS)
    dx, dweight = BACKWARD[code](x, None, x, weight, rstd)
    assert y.shape == dx.shape == x.shape and rstd.shape == (2, 0)
    assert torch.equal(dweight, torch.zeros(16))


@pytest.mark.parametrize("code", BOTH)
def test_large_and_small_values_in_fp16(code: str) -> None:
    """The square of 1e4 overflows in fp16; the square of 1e-4 underflows."""
    weight = torch.ones(512, dtype=torch.float16)
    for size in (1e4, 6e4, 1e-4):
        x = torch.full((2, 512), size, dtype=torch.float16)
        y, rstd = FORWARD[code](x, weight, 1e-12)
        assert distance(y, torch.ones(2, 512)) < 2e-3
        dx, dweight = BACKWARD[code](torch.ones_like(x), None, x, weight, rstd)
        assert torch.isfinite(dx).all() and distance(dweight, torch.full((512,), 2.0)) < 2e-3


def test_gradcheck() -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 7), (3, 7), (7,)))
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS), (x, residual, weight))


def test_unused_sum_or_norm() -> None:
    x, residual, weight = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True), torch.randn(8)
    y, total = add_rms_norm(x, residual, weight.requires_grad_(), EPS)
    (only_y,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (expected,) = torch.autograd.grad(reference(x + residual, weight, EPS).sum(), x)
    assert distance(only_y, expected) < 1e-5
    (only_total,) = torch.autograd.grad(total.sum(), residual)
    assert torch.equal(only_total, torch.ones(3, 8))


@pytest.mark.slow
def test_opcheck() -> None:
    x, residual, weight = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8), torch.randn(8, requires_grad=True)
    torch.library.opcheck(torch.ops.strata.rms_norm.default, (x, weight, EPS))
    torch.library.opcheck(torch.ops.strata.add_rms_norm.default, (x, residual, weight, EPS))
    _, rstd = torch.ops.strata.rms_norm(x.detach(), weight.detach(), EPS)
    for dsum in (None, residual):
        torch.library.opcheck(torch.ops.strata.rms_norm_backward.default, (residual, dsum, x.detach(), weight.detach(), rstd))


def test_compiles_without_a_graph_break() -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y, total = add_rms_norm(x, residual, weight, EPS)
        return rms_norm(y + total, weight, EPS)

    inputs = [torch.randn(3, 8, requires_grad=True), torch.randn(3, 8), torch.randn(8, requires_grad=True)]
    eager = block(*inputs)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(*inputs)
    assert torch.equal(compiled, eager)
    for ours, truth in zip(*(torch.autograd.grad(y.sum(), (inputs[0], inputs[2])) for y in (compiled, eager)), strict=True):
        assert torch.equal(ours, truth)


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"float16 or bfloat16 .*got torch.int32"):
        rms_norm(torch.ones(2, 4, dtype=torch.int32), torch.ones(4), EPS)
    with pytest.raises(ValueError, match=r"weight of \[4\], got torch.float32 \[5\]"):
        rms_norm(torch.ones(2, 4), torch.ones(5), EPS)
    with pytest.raises(ValueError, match=r"up to 65536 values, got 65537"):
        rms_norm(torch.ones(1, 65537), torch.ones(65537), EPS)
    with pytest.raises(ValueError, match=r"one shape and dtype, got \[2, 4\] torch.float32 and \[1, 4\] torch.float32"):
        add_rms_norm(torch.ones(2, 4), torch.ones(1, 4), torch.ones(4), EPS)
