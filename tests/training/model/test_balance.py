"""Balance loss against a plain loop over sequences and experts, and the gradient that its hook adds."""

import pytest
import torch
from torch import Tensor, nn

from strata.platform.recipe import ModelSection
from strata.training.model.balance import attach, sequence_balance

from ..plain import balance_loss

CONTEXT, EXPERTS, HIDDEN = 16, 5, 3


def section(**moe: float) -> ModelSection:
    sizes = {"layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 512, "context": CONTEXT}
    return ModelSection.model_validate(sizes | {"moe": {"experts": EXPERTS, "top_k": 2, "balance": 0.3} | moe})


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("shape", "top_k"), [((1, 6, 4), 1), ((3, 5, 4), 2), ((2, 7, 6), 3), ((2, 3, 4), 4)])
def test_balance_equals_a_loop_over_sequences(shape: tuple[int, ...], top_k: int) -> None:
    logits = 2 * random(*shape)
    assert sequence_balance(logits, top_k).item() == pytest.approx(balance_loss(logits, top_k).item(), rel=1e-5)
    low = logits.bfloat16()  # computed in fp32
    assert sequence_balance(low, top_k).item() == pytest.approx(balance_loss(low.float(), top_k).item(), rel=1e-5)


def test_balance_of_two_tokens() -> None:
    """Token 1 has the probabilities 3/4 and 1/4, token 2 has 2/3 and 1/3: both choose expert 1, with a mean of 17/24."""
    logits = torch.tensor([[[3.0, 1.0], [2.0, 1.0]]]).log()
    assert sequence_balance(logits, 1).item() == pytest.approx(2 * 17 / 24)


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        with torch.no_grad():
            router.weight.copy_(random(EXPERTS, HIDDEN, seed=1))
        parent: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, router)
        self.router = router


def router_gradient(block: Block, x: Tensor) -> Tensor:
    block.router.weight.grad = None
    output = block.router(x)
    (output * random(*output.shape, seed=2)).sum().backward()
    assert block.router.weight.grad is not None
    return block.router.weight.grad


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["layers.0.mlp.gate", "mlp.gate", "mlp.router.gate"])
def test_gradient_is_that_of_the_weighted_balance_loss(name: str, flat: bool) -> None:
    """The weight is scale x balance / layers = 0.5 x 0.3 / 4. DeepSpeed's router has all sequences in one dimension."""
    x = random(3, CONTEXT, HIDDEN, seed=3)
    x = x.flatten(0, 1) if flat else x
    block = Block(name)
    plain = router_gradient(block, x)
    weight = block.router.weight.detach().clone().requires_grad_()
    (0.5 * 0.3 / 4 * balance_loss((x @ weight.T).view(3, CONTEXT, EXPERTS), 2)).backward()
    attach(block, section(), scale=0.5)
    assert weight.grad is not None
    torch.testing.assert_close(router_gradient(block, x), plain + weight.grad, rtol=1e-5, atol=1e-6)


def test_output_and_evaluation_are_unchanged() -> None:
    block, x = Block("mlp.gate"), random(2, CONTEXT, HIDDEN)
    before = block.router(x)
    attach(block, section(), scale=0.5)
    assert torch.equal(block.router(x), before)
    with torch.no_grad():
        assert torch.equal(block.router(x[:, :7]), before[:, :7])


@pytest.mark.parametrize(("name", "moe"), [("mlp.gate", {"balance": 0.0}), ("mlp.gate_proj", {}), ("attention.gate", {})])
def test_other_modules_and_zero_weight_have_no_hook(name: str, moe: dict[str, float]) -> None:
    block = Block(name)
    attach(block, section(**moe), scale=1.0)
    assert not block.router._forward_hooks


def test_dense_model_has_no_hook() -> None:
    block = Block("mlp.gate")
    attach(block, section().model_copy(update={"moe": None}), scale=1.0)
    assert not block.router._forward_hooks
