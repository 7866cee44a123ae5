"""linear_cross_entropy on a GPU against the reference in fp64, in every dtype, without synchronization."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.linear_cross_entropy.linear_cross_entropy import LOGITS_BYTES, REDUCTIONS, linear_cross_entropy, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
ALL_TERMS: dict[str, Any] = {"ignore_index": 2, "label_smoothing": 0.1, "z_loss": 1e-3}


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Fills free memory with NaN, so that unwritten outputs are detected."""
    torch.cuda.empty_cache()
    torch.full((1 << 28,), float("nan"), device="cuda")


@pytest.fixture
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def drawn(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, width, device="cuda").to(dtype)
    weight = (torch.randn(vocabulary, width, device="cuda") * width**-0.5).to(dtype)
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(vocabulary, (tokens,), device="cuda")


def truth(x: Tensor, weight: Tensor, targets: Tensor, dloss: Tensor, **options: Any) -> tuple[Tensor, ...]:
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = reference(x, weight, targets, **options)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight), dloss.double())


def worst(x: Tensor, weight: Tensor, targets: Tensor, dloss: Tensor, **options: Any) -> float:
    """Largest relative error of loss and gradients."""
    loss = linear_cross_entropy(x, weight, targets, **options)
    found = (loss.detach(), *torch.autograd.grad(loss, (x, weight), dloss))
    expected = truth(x, weight, targets, dloss, **options)
    assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == x.dtype
    return max(((one - other).norm() / other.norm()).item() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "tokens, width, vocabulary",
    [(1, 64, 3), (3, 3, 127), (127, 1, 127), (129, 127, 4097), (4097, 64, 4097), (300, 128, 50257), (200, 64, 131072)],
)
def test_loss_and_gradients(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> None:
    assert worst(*drawn(tokens, width, vocabulary, dtype), torch.ones((), device="cuda")) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_terms_reductions_and_incoming_gradients(reduction: str, dtype: torch.dtype) -> None:
    x, weight, targets = drawn(500, 96, 1000, dtype)
    targets[::3] = ALL_TERMS["ignore_index"]
    dloss = torch.randn(500 if reduction == "none" else (), device="cuda")
    assert worst(x, weight, targets, dloss, reduction=reduction, **ALL_TERMS) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunks", [3, 16])
def test_several_chunks(chunks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = drawn(2048, 64, 1000, dtype)
    monkeypatch.setitem(LOGITS_BYTES, "cuda", 2048 // chunks * 1024 * x.element_size())
    assert worst(x, weight, targets, torch.ones((), device="cuda")) < TOLERANCE[dtype]


def test_extreme_logits() -> None:
    x, weight, targets = drawn(100, 64, 1000, torch.float32)
    assert worst((x * 1000).detach().requires_grad_(), weight, targets, torch.ones((), device="cuda")) < 1e-4  # fp32 at 1e3


def test_fp16_loss_scale() -> None:
    x, weight, targets = drawn(4096, 64, 1000, torch.float16)
    targets[:] = 3  # the unscaled sum in the weight gradient overflows in fp16
    x, weight = (x.detach().abs() * 50).requires_grad_(), (weight.detach() / 50).requires_grad_()
    assert worst(x, weight, targets, torch.tensor(2.0**8, device="cuda")) < TOLERANCE[torch.float16]


def test_mean_over_no_tokens_is_zero() -> None:
    for tokens in (0, 130):
        x, weight, targets = drawn(tokens, 64, 1000, torch.bfloat16)
        loss = linear_cross_entropy(x, weight, targets.fill_(-100))
        loss.backward()
        assert x.grad is not None and weight.grad is not None
        assert loss == 0 and not x.grad.any() and not weight.grad.any()


def test_invalid_targets_return_nan() -> None:
    x, weight, targets = drawn(8, 64, 1000, torch.bfloat16)
    targets[1], targets[2], targets[3] = 1000, -1, 2**62
    losses = linear_cross_entropy(x, weight, targets, reduction="none")
    losses.sum().backward()
    assert x.grad is not None
    assert losses.isnan().tolist() == x.grad.isnan().all(1).tolist() == [False, True, True, True, False, False, False, False]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_synchronization(reduction: str, no_synchronization: None) -> None:
    x, weight, targets = drawn(256, 64, 1000, torch.bfloat16)
    (linear_cross_entropy(x, weight, targets, reduction=reduction).sum() / 3).backward()


def test_second_backward_pass() -> None:
    x, weight, targets = drawn(256, 64, 1000, torch.bfloat16)
    loss = linear_cross_entropy(x, weight, targets)
    first = torch.autograd.grad(loss / 4, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight))
    assert all(torch.equal(one * 4, other) for one, other in zip(first, second, strict=True))


def test_compiled_by_inductor() -> None:
    x, weight, targets = drawn(256, 64, 1000, torch.bfloat16)

    @torch.compile(fullgraph=True)
    def step(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x * 2, weight, targets) / 3

    def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x * 2, weight, targets) / 3

    found = torch.autograd.grad(step(x, weight, targets), (x, weight))
    expected = torch.autograd.grad(plain(x, weight, targets), (x, weight))
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() < 5e-3 * other.float().norm()


def test_memory_beyond_inputs_and_outputs_is_bounded() -> None:
    x, weight, targets = drawn(8192, 512, 131072, torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(x, weight, targets).backward()
    assert x.grad is not None and weight.grad is not None
    extra = torch.cuda.max_memory_allocated() - before - x.grad.nbytes - weight.grad.nbytes
    assert extra < LOGITS_BYTES["cuda"] + 2**26
