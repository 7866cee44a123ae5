"""DoRA computes peft's formula, in outputs and gradients, and merges into a plain weight."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.planner.memory.tuning import Adapters
from strata.platform.recipe import LoraSection
from strata.training.model import dora, lora
from strata.training.model.dora import DoraLinear

LORA = LoraSection(rank=3, alpha=6, dora=True)
INPUTS, OUTPUTS = 24, 40


def projection(bias: bool, section: LoraSection = LORA) -> DoraLinear:
    torch.manual_seed(0)
    base = nn.Linear(INPUTS, OUTPUTS, bias=bias).requires_grad_(False)
    module = DoraLinear(base, section)
    module.weight_squares = base.weight.square().sum(1)
    with torch.no_grad():
        module.lora_B.weight.normal_(std=0.3)
        module.lora_magnitude_vector.copy_(base.weight.norm(dim=1) * torch.linspace(0.5, 1.5, OUTPUTS))
    return module


def plain(module: DoraLinear, x: Tensor, dropped: Tensor | None = None) -> Tensor:
    """peft's formula, with the whole weight in memory."""
    weight, bias = module.base.weight, module.base.bias
    added = 2 * module.lora_B.weight @ module.lora_A.weight
    factor = module.lora_magnitude_vector / (weight + added).norm(dim=1).detach()
    dropped = x if dropped is None else dropped
    y = x @ weight.T + (factor - 1) * (dropped @ weight.T) + factor * (dropped @ added.T)
    return y if bias is None else y + bias


def results(y: Tensor, module: DoraLinear, x: Tensor) -> list[Tensor]:
    trained = [module.lora_A.weight, module.lora_B.weight, module.lora_magnitude_vector, x]
    return [y, *torch.autograd.grad((y * torch.linspace(-1, 1, OUTPUTS)).square().sum(), trained)]


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_pefts(bias: bool) -> None:
    module, x = projection(bias), torch.randn(2, 7, INPUTS, requires_grad=True)
    for own, expected in zip(results(module(x), module, x), results(plain(module, x), module, x), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_dropout_reaches_what_the_adapter_adds_to_the_base() -> None:
    module = projection(True, LORA.model_copy(update={"dropout": 0.5}))
    x = torch.randn(5, INPUTS, requires_grad=True)
    torch.manual_seed(1)
    own = results(module(x), module, x)
    torch.manual_seed(1)
    expected = results(plain(module, x, nn.functional.dropout(x, 0.5)), module, x)
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.eval()(x), plain(module, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_forward_pass_saves_what_a_memory_plan_counts(dropout: float) -> None:
    """The plan leaves out vectors and the mask of dropout."""
    tokens, module = 1000, projection(False, LORA.model_copy(update={"dropout": dropout}))
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    x = torch.randn(tokens, INPUTS, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = module(x)
    mask = tokens * INPUTS if dropout else 0
    held = sum(size for at, size in saved.items() if size >= tokens and at != x.data_ptr()) - mask
    planned = Adapters(3, ("q_proj",), dora=True, dropout=dropout > 0).saved({"q_proj": (INPUTS, OUTPUTS)}, 1, products=False)
    assert y.requires_grad and held == tokens * planned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_adapter_changes_nothing(dtype: torch.dtype) -> None:
    module = projection(False).to(dtype)
    module.weight_squares = module.base.weight.float().square().sum(1)
    with torch.no_grad():
        module.lora_B.weight.zero_()
        module.lora_magnitude_vector.copy_(module.weight_squares.sqrt())
    x = torch.randn(5, INPUTS, dtype=dtype)
    assert torch.equal(module(x), module.base(x))


def test_a_row_of_zeros_stays_one() -> None:
    module = projection(False)
    with torch.no_grad():
        for vector in (module.base.weight[0], module.lora_B.weight[0], module.lora_magnitude_vector[:1]):
            vector.zero_()
    module.weight_squares = module.base.weight.square().sum(1)
    y = module(torch.randn(5, INPUTS))
    assert not y[:, 0].any() and y.isfinite().all()
    merged = dora.merged(module.base.weight, module.lora_magnitude_vector)
    assert not merged[0].any() and merged.isfinite().all()


def test_merged_weights_compute_the_same() -> None:
    module, x = projection(False), torch.randn(5, INPUTS)
    whole = lora.merged(module.base.weight, module.lora_A.weight, module.lora_B.weight, LORA)
    torch.testing.assert_close(x @ dora.merged(whole, module.lora_magnitude_vector).T, module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_pefts_own_layer_computes_the_same(bias: bool) -> None:
    layers: Any = pytest.importorskip("peft.tuners.lora.layer")
    config: Any = pytest.importorskip("peft").LoraConfig(r=3, lora_alpha=6, use_dora=True)
    module, x = projection(bias), torch.randn(2, 7, INPUTS)
    theirs = layers.Linear(module.base, "default", r=3, lora_alpha=6, config=config, use_dora=True)
    with torch.no_grad():
        theirs.lora_A["default"].weight.copy_(module.lora_A.weight)
        theirs.lora_B["default"].weight.copy_(module.lora_B.weight)
        theirs.lora_magnitude_vector["default"].weight.copy_(module.lora_magnitude_vector)
    torch.testing.assert_close(module(x), theirs(x), rtol=1e-5, atol=1e-5)
