"""Fused adapters: outputs and gradients equal plain products, also compiled and in the model."""

import pytest
import torch
from torch import Tensor, nn

from strata.kernels.ops.lora_projections import lora_projections, reference
from strata.platform.recipe import LoraSection, ModelSection
from strata.training.model import lora
from strata.training.model.llama import Llama

WIDTHS = (8, 4, 4)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def inputs(tokens: tuple[int, ...] = (3, 5)) -> tuple[Tensor, list[Tensor], list[Tensor | None], list[Tensor], list[Tensor]]:
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    weights = [drawn(width, 16) for width in WIDTHS]
    downs, ups = [drawn(rank, 16) for rank in (2, 3, 2)], [drawn(w, r) for w, r in zip(WIDTHS, (2, 3, 2), strict=True)]
    for learned in (*downs, *ups):
        learned.requires_grad_()
    return drawn(*tokens, 16).requires_grad_(), weights, [drawn(8), None, drawn(4)], downs, ups


def gradients(outputs: list[Tensor], learned: list[Tensor]) -> tuple[Tensor, ...]:
    loss = sum(((output**2).sum() * (number + 1) for number, output in enumerate(outputs)), torch.zeros(()))
    return torch.autograd.grad(loss, learned)


@pytest.mark.parametrize("tokens", [(3, 5), (1, 1), (0, 4)])
@pytest.mark.parametrize("compiled", [False, True])
def test_products_and_gradients_equal_the_plain_ones(tokens: tuple[int, ...], compiled: bool) -> None:
    x, weights, biases, downs, ups = inputs(tokens)
    run = torch.compile(lora_projections, backend="aot_eager", fullgraph=True) if compiled else lora_projections
    found = run(x, weights, biases, downs, ups, 0.5)
    wanted = reference(x, weights, biases, downs, ups, 0.5)
    torch.testing.assert_close(found, wanted)
    learned = [x, *downs, *ups]
    torch.testing.assert_close(gradients(found, learned), gradients(wanted, learned))


def test_operator_is_correctly_registered() -> None:
    x, weights, biases, downs, ups = inputs((7,))
    torch.library.opcheck(torch.ops.strata.lora_projections.default, (x, weights, biases, downs, ups, 0.5))


def test_model_computes_the_same_with_fused_adapters() -> None:
    section = ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=512, context=16)
    model = Llama(section, 0, "torch", LoraSection(rank=4, alpha=8, targets=TARGETS))
    for name, parameter in model.named_parameters():
        if lora.is_adapter(name):
            nn.init.normal_(parameter, std=0.1)
    learned = [parameter for name, parameter in model.named_parameters() if lora.is_adapter(name)]
    tokens = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(0))
    plain = model(tokens, targets_bt=tokens)
    wanted = torch.autograd.grad(plain, learned)
    lora.fuse(model)
    fused = model(tokens, targets_bt=tokens)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(torch.autograd.grad(fused, learned), wanted)


def test_adapters_with_dropout_are_not_fused() -> None:
    section = ModelSection(layers=1, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=512, context=16)
    model = Llama(section, 0, "torch", LoraSection(rank=4, alpha=8, targets=TARGETS, dropout=0.1))
    lora.fuse(model)
    assert not any(module.fused for module in model.modules() if isinstance(module, lora.LoraLinear))
