"""Training on the device: the laptop recipe's model, optimizers, mixed precision and torch.compile, beside the CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.kernels import device
from strata.platform import recipe_file
from strata.training.model.llama import Llama

device.load()


def losses(place: str, steps: int, optimizer: type[torch.optim.Optimizer], **settings: object) -> list[float]:
    section = recipe_file.load("laptop", ["model.context=64"]).model
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(0, section.vocab, (steps, 2, section.context + 1), generator=generator) // 8
    model = Llama(section, seed=0).to(place)
    optimize = optimizer(model.parameters(), lr=3e-3, **settings)  # type: ignore[arg-type]
    found = []
    for batch in batches.to(place):
        loss = model(batch[:, :-1], targets_bt=batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimize.step()
        optimize.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.SGD, {}),
    ],
    ids=["foreach", "fused", "single", "sgd"],
)
def test_the_laptop_model_has_the_losses_of_the_cpu(optimizer: type[torch.optim.Optimizer], settings: dict[str, bool]) -> None:
    steps = 10 if not settings and optimizer is torch.optim.AdamW else 3
    device.clear_fallbacks()
    ours, theirs = (losses(place, steps, optimizer, **settings) for place in ("strata", "cpu"))
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4, (ours, theirs)
    assert ours[-1] < ours[0], "it learns"
    assert device.fallbacks() == {"strata::linear_cross_entropy": steps}, "all else has kernels"


def test_training_leaves_no_memory_behind() -> None:
    before = torch.strata.memory_allocated()
    losses("strata", 2, torch.optim.SGD)
    assert torch.strata.memory_allocated() == before
    assert torch.strata.max_memory_allocated() > before


def block(x: Tensor, w: Tensor) -> Tensor:
    y = F.silu(x @ w) * x
    return F.cross_entropy(y, torch.arange(len(x), device=x.device) % y.shape[1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions(backend: str) -> None:
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    for rows in (4, 7):
        x, w = torch.randn(rows, 6), torch.randn(6, 6)
        results = []
        for call, place in ((block, "cpu"), (compiled, "strata")):
            leaves = [tensor.detach().clone().to(place).requires_grad_() for tensor in (x, w)]
            loss = call(*leaves)
            loss.backward()
            results.append([loss.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(b, a)


def test_its_own_operator_compiles() -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.strata_device.rms_norm(x, w, 1e-6)[0] * 2

    x, w = torch.randn(3, 8, device="strata", requires_grad=True), torch.ones(8, device="strata", requires_grad=True)
    expected = call(x, w)
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(x, w)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y.square().sum(), (x, w)) for y in (expected, found)]
    torch.testing.assert_close(*gradients)


def test_mixed_precision() -> None:
    x, w = torch.randn(4, 6), torch.randn(5, 6)
    results = []
    for place in ("cpu", "strata"):
        leaf = w.to(place, copy=True).requires_grad_()
        with torch.autocast(place, dtype=torch.bfloat16):
            y = F.linear(x.to(place), leaf)
            loss = F.cross_entropy(y, torch.tensor([0, 1, 2, 3], device=place))
        assert y.dtype == torch.bfloat16 and loss.dtype == torch.float32
        loss.backward()
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32
        results.append((loss.detach().cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)
