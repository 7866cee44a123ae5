"""linear_cross_entropy: the CPU implementation and the interpreted Triton kernels against the reference in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.linear_cross_entropy.linear_cross_entropy import (
    LOGITS_BYTES,
    REDUCTIONS,
    backward_per_token,
    chunk_size,
    forward,
    linear_cross_entropy,
    multiply_triton,
    reference,
)
from strata.kernels.ops.linear_cross_entropy.rows import Rows, softmax_rows_cpu, softmax_rows_triton

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the compiled kernels")
BOTH = [pytest.param(softmax_rows_cpu, id="cpu"), pytest.param(softmax_rows_triton, id="triton", marks=interpreted)]
PLAIN = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}
ALL_TERMS = {"ignore_index": 2, "label_smoothing": 0.1, "z_loss": 1e-2}

Options = dict[str, Any]


def distance(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth.double()).norm() / truth.double().norm()).item()


def drawn(tokens: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens + width + vocabulary)
    x, weight = torch.randn(tokens, width).to(dtype), (torch.randn(vocabulary, width) * width**-0.5).to(dtype)
    targets = torch.randint(vocabulary, (tokens,))
    return x.requires_grad_(), weight.requires_grad_(), targets


def truth(x: Tensor, weight: Tensor, targets: Tensor, dloss: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Reference loss, and gradients of input and weight."""
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = reference(x, weight, targets, **options)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight), dloss)]


def ours(rows: Rows, x: Tensor, weight: Tensor, targets: Tensor, reduction: str, terms: Options, dloss: Tensor) -> list[Tensor]:
    """The same from `rows`: the implementation of the operator on either device, without its registration."""
    x, weight = x.detach(), weight.detach()
    loss, dx, dweight, pending_scale, lse = forward(rows, x, weight, targets, *terms.values(), reduction, True, True)
    if reduction == "none":
        dx, dweight = backward_per_token(rows, dloss, x, weight, targets, lse, *terms.values(), True, True)
        return [loss, dx, dweight]
    for held in (dx, dweight):
        multiply_triton(held, pending_scale * dloss) if rows is softmax_rows_triton else held.mul_(pending_scale * dloss)
    return [loss, dx.to(x.dtype), dweight.to(x.dtype)]


@pytest.mark.parametrize("rows", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens, width, vocabulary", [(1, 1, 3), (3, 3, 127), (17, 5, 129), (5, 64, 4097)])
def test_loss_and_gradients_equal_the_reference(rows: Rows, dtype: torch.dtype, tokens: int, width: int, vocabulary: int) -> None:
    x, weight, targets = drawn(tokens, width, vocabulary, dtype)
    expected = truth(x, weight, targets, **PLAIN)
    found = ours(rows, x, weight, targets, "mean", PLAIN, torch.ones(()))
    assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == dtype
    assert max(distance(one, other) for one, other in zip(found, expected, strict=True)) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", BOTH)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("terms", [ALL_TERMS, PLAIN | {"label_smoothing": 1.0}, PLAIN | {"z_loss": 0.5}], ids=str)
def test_loss_terms_and_reductions(rows: Rows, reduction: str, terms: Options) -> None:
    x, weight, targets = drawn(30, 16, 77)
    targets[::4] = terms["ignore_index"]
    dloss = torch.randn(30 if reduction == "none" else ())
    expected = truth(x, weight, targets, dloss.double(), reduction=reduction, **terms)
    found = ours(rows, x, weight, targets, reduction, terms, dloss)
    assert max(distance(one, other) for one, other in zip(found, expected, strict=True)) < 1e-5
    ignored = targets == terms["ignore_index"]
    assert not found[1][ignored].any() and found[1][~ignored].any(1).all()


@pytest.mark.slow
@pytest.mark.parametrize("rows", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_does_not_depend_on_the_chunk_size(rows: Rows, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one token per chunk to all. With more than eight chunks, the weight gradient is accumulated in fp32."""
    x, weight, targets = drawn(20, 8, 64, dtype)
    expected = truth(x, weight, targets)
    monkeypatch.setattr("strata.kernels.ops.linear_cross_entropy.linear_cross_entropy.LOGITS_BYTES", {"cpu": 0})
    for tokens in (1, 3, 7, 20):
        monkeypatch.setattr("strata.kernels.ops.linear_cross_entropy.linear_cross_entropy.LEAST_TOKENS", tokens)
        found = ours(rows, x, weight, targets, "mean", PLAIN, torch.ones(()))
        assert max(distance(one, other) for one, other in zip(found, expected, strict=True)) < TOLERANCE[dtype]


def test_memory_for_logits_is_bounded_and_chunks_are_even() -> None:
    gpu = torch.device("cuda")
    assert chunk_size(8192, 2 * 131072, gpu) == 2048 and chunk_size(2049, 2 * 131072, gpu) == 1152
    assert chunk_size(1000, 1 << 40, gpu) == 128 and chunk_size(1, 2, gpu) == chunk_size(0, 2, gpu) + 127 == 128
    for tokens in (5000, 8191, 8193, 100_000):
        assert chunk_size(tokens, 2 * 50304, gpu) * 2 * 50304 <= LOGITS_BYTES["cuda"]


@pytest.mark.parametrize("rows", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_extreme_logits(rows: Rows, dtype: torch.dtype) -> None:
    x, weight, targets = drawn(6, 4, 33)
    x = (x.detach() * 300).to(dtype)
    weight = (weight.detach() * 50).to(dtype)
    expected = truth(x, weight, targets)
    found = ours(rows, x, weight, targets, "mean", PLAIN, torch.ones(()))
    assert all(one.isfinite().all() for one in found)
    assert max(distance(one, other) for one, other in zip(found, expected, strict=True)) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", BOTH)
def test_fp16_gradients_neither_overflow_nor_underflow_before_scaling(rows: Rows) -> None:
    """Unscaled, the first weight gradient exceeds 100,000. Without the loss scale, the second is about 1e-8."""
    x, weight, targets = drawn(32, 4, 64, torch.float16)
    targets[:] = 7
    for inputs, scale in ((x.detach().abs() * 4000, 8.0), (x.detach().abs() / 1000, 2.0**16)):
        dloss = torch.tensor(scale)
        expected = truth(inputs, weight, targets, dloss.double())
        found = ours(rows, inputs, weight, targets, "mean", PLAIN, dloss)
        assert max(distance(one, other) for one, other in zip(found, expected, strict=True)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("rows", BOTH)
@pytest.mark.parametrize("tokens", [0, 5])
def test_mean_over_no_tokens_is_zero(rows: Rows, tokens: int) -> None:
    x, weight, _ = drawn(tokens, 4, 9)
    loss, dx, dweight = ours(rows, x, weight, torch.full((tokens,), -100), "mean", PLAIN, torch.ones(()))
    assert loss == 0 and not dx.any() and not dweight.any() and dweight.shape == weight.shape


@interpreted
def test_triton_returns_nan_for_invalid_targets() -> None:
    x, weight, targets = drawn(4, 4, 9)
    targets[1], targets[2] = 9, -7
    loss, dx, _ = ours(softmax_rows_triton, x, weight, targets, "none", PLAIN, torch.ones(4))
    assert loss.isnan().tolist() == dx.isnan().all(1).tolist() == [False, True, True, False]


@interpreted
def test_scaling_by_one_leaves_values_unchanged() -> None:
    values = torch.randn(5000)
    expected = values * 0.5
    multiply_triton(values, torch.tensor([0.5]))
    assert torch.equal(values, expected)
    multiply_triton(values, torch.ones(1))
    assert torch.equal(values, expected)


def test_input_strides() -> None:
    x, weight, targets = drawn(12, 8, 40)
    expected = truth(x, weight, targets)
    wide, tall = torch.zeros(12, 16), torch.zeros(8, 40)
    wide[:, ::2], tall[:] = x.detach(), weight.detach().T
    x, weight, targets = wide[:, ::2].requires_grad_(), tall.T.requires_grad_(), targets.repeat_interleave(2)[::2]
    loss = linear_cross_entropy(x, weight, targets)
    for one, other in zip((loss, *torch.autograd.grad(loss, (x, weight))), expected, strict=True):
        assert distance(one, other) < 1e-5


@pytest.mark.parametrize("learned", ["input", "weight"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_of_one_input_only(learned: str, reduction: str) -> None:
    x, weight, targets = drawn(12, 8, 40)
    dloss = torch.ones(12 if reduction == "none" else ())
    expected = truth(x, weight, targets, dloss, reduction=reduction)
    x, weight = x.detach().requires_grad_(learned == "input"), weight.detach().requires_grad_(learned == "weight")
    linear_cross_entropy(x, weight, targets, reduction=reduction).backward(dloss)
    grad, other, want = (x.grad, weight.grad, expected[1]) if learned == "input" else (weight.grad, x.grad, expected[2])
    assert grad is not None and other is None and distance(grad, want) < 1e-5


def test_no_gradients_are_computed_under_no_grad() -> None:
    x, weight, targets = drawn(12, 8, 40)
    expected = truth(x, weight, targets)[0]
    with torch.no_grad():
        assert distance(linear_cross_entropy(x, weight, targets), expected) < 1e-5
        _, dx, dweight, _, _ = forward(softmax_rows_cpu, x, weight, targets, *PLAIN.values(), "mean", False, False)
    assert not dx.numel() and not dweight.numel()


def test_second_backward_pass_sees_unscaled_gradients() -> None:
    x, weight, targets = drawn(12, 8, 40)
    loss = linear_cross_entropy(x, weight, targets)
    first = torch.autograd.grad(loss / 4, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight))
    assert all(torch.equal(one * 4, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(linear_cross_entropy(x, weight, targets), x, create_graph=True)


def test_saved_gradient_is_returned_without_a_copy() -> None:
    x, weight, targets = drawn(12, 8, 40)
    loss = linear_cross_entropy(x, weight, targets)
    held = loss.grad_fn.saved_tensors[1].data_ptr()  # type: ignore[union-attr]
    (loss / 3).backward()
    assert weight.grad is not None and weight.grad.data_ptr() == held


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck(reduction: str) -> None:
    x, weight, targets = drawn(5, 3, 7, torch.float64)
    targets[2] = ALL_TERMS["ignore_index"]
    torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, targets, reduction=reduction, **ALL_TERMS), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction: str, dtype: torch.dtype) -> None:
    x, weight, targets = drawn(6, 4, 9, dtype)
    terms = (*ALL_TERMS.values(), reduction)
    torch.library.opcheck(torch.ops.strata.linear_cross_entropy.default, (x, weight, targets, *terms, True, True))
    x, weight = x.detach(), weight.detach()
    torch.library.opcheck(torch.ops.strata.linear_cross_entropy.default, (x, weight, targets, *terms, False, False))
    each = (torch.ones(6), x, weight, targets, torch.ones(6), *ALL_TERMS.values(), True, True)
    torch.library.opcheck(torch.ops.strata.linear_cross_entropy_backward.default, each)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiles_without_a_graph_break(reduction: str) -> None:
    x, weight, targets = drawn(12, 8, 40)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(2 * x, weight, targets, reduction=reduction).sum() / 3

    torch._dynamo.reset()
    for tokens in (12, 7, 5):
        part = x.detach()[:tokens].requires_grad_()
        found = torch.autograd.grad(step(part, weight, targets[:tokens]), (part, weight))
        dloss = torch.full((tokens,) if reduction == "none" else (), 1 / 3, dtype=torch.float64)
        _, dx, dweight = truth(2 * part, weight, targets[:tokens], dloss, reduction=reduction)
        assert distance(found[0], 2 * dx) < 1e-5 and distance(found[1], dweight) < 1e-5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(2, 3, 4)}, r"x \[tokens, width\].*got \[2, 3, 4\], \[9, 4\] and \[3\]"),
        ({"weight": torch.zeros(9, 5)}, r"got \[3, 4\], \[9, 5\] and \[3\]"),
        ({"weight": torch.zeros(0, 4)}, "no rows"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"and \[2\]"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, "int64 targets, got torch.int32"),
        ({"targets": torch.tensor([0, 9, 1])}, r"target 9 is neither a row of the weight \(0 to 8\) nor the ignore_index -100"),
        ({"targets": torch.tensor([0, -1, 1])}, "target -1"),
        ({"weight": torch.zeros(9, 4, dtype=torch.bfloat16)}, "one dtype, got torch.float32 and torch.bfloat16"),
        ({"x": torch.zeros(3, 4, dtype=torch.int32)}, "float32, float16 or bfloat16 .*got torch.int32"),
        ({"reduction": "max"}, "mean, sum, none, got 'max'"),
        ({"label_smoothing": 1.5}, "from 0 to 1, got 1.5"),
    ],
)
def test_invalid_arguments_are_rejected(change: Options, message: str) -> None:
    arguments = {"x": torch.zeros(3, 4), "weight": torch.zeros(9, 4), "targets": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(arguments | change))
