"""GPTQ, AWQ and SmoothQuant against what they promise: less error of a layer's output than rounding to nearest."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.training.quantization import grid, layers, scaling
from strata.training.quantization.calibration import LayerPass, Statistics
from strata.training.quantization.formats import FORMATS
from strata.training.quantization.gptq import gptq
from strata.training.quantization.rounding import Rounding

from .conftest import VOCAB, build

GPTQ, AWQ = FORMATS["w4a16-gptq"], FORMATS["w4a16-awq"]


def correlated(inputs: int, tokens: int = 512) -> Tensor:
    """Activations with a few large channels, and channels that depend on each other."""
    torch.manual_seed(1)
    mixed = torch.randn(tokens, inputs) @ (torch.eye(inputs) + 0.5 * torch.randn(inputs, inputs) / inputs**0.5)
    return mixed * torch.logspace(0, -1.5, inputs)[torch.randperm(inputs)]


def statistics_of(activations: Tensor) -> Statistics:
    found = Statistics(activations.shape[1], activations.device)
    found.add(activations)
    return found


def test_gptq_loses_less_than_rounding_to_nearest() -> None:
    activations, weight = correlated(128), torch.randn(48, 128)
    args = GPTQ.scheme(32).weights
    assert args
    fitted = grid.fit(weight, args, torch.bfloat16)
    rounded = gptq(weight, statistics_of(activations).hessian, fitted)
    errors = [float(((other - weight) @ activations.T).square().mean()) for other in (rounded, fitted.round(weight))]
    assert errors[0] < 0.8 * errors[1]
    torch.testing.assert_close(fitted.round(rounded), rounded, atol=1e-6, rtol=1e-6)  # values of the grid, not between them


def test_gptq_survives_dead_and_dependent_inputs() -> None:
    activations = correlated(64, tokens=16)  # fewer tokens than inputs: a singular matrix
    activations[:, 5] = 0
    weight = torch.randn(32, 64)
    args = GPTQ.scheme(32).weights
    assert args
    assert gptq(weight, statistics_of(activations).hessian, grid.fit(weight, args, torch.bfloat16)).isfinite().all()


def test_gptq_refuses_activations_that_are_not_finite() -> None:
    activations, weight = correlated(64), torch.randn(32, 64)
    activations[3, 3] = float("nan")
    args = GPTQ.scheme(32).weights
    assert args
    with pytest.raises(ArithmeticError):
        gptq(weight, statistics_of(activations).hessian, grid.fit(weight, args, torch.bfloat16))


def test_clipping_never_loses_more_than_the_whole_range() -> None:
    torch.manual_seed(2)
    weight = torch.randn(16, 64)
    weight[:, 7] *= 6
    args = AWQ.scheme(32).weights
    assert args
    importance = torch.rand(64)
    errors = [
        ((grid.fit(weight, args, torch.bfloat16, given).round(weight) - weight).square() * importance).sum()
        for given in (importance, None)
    ]
    assert errors[0] < errors[1]


def test_zero_and_constant_weights_stay() -> None:
    for format in FORMATS.values():
        args = format.scheme(32 if format.grouped else None).weights
        assert args
        weight = torch.zeros(4, 64)
        weight[1] = 0.25
        rounded = grid.fit(weight, args, torch.bfloat16).round(weight)
        # A symmetric grid of 4 bits ends half a step below its largest weight.
        torch.testing.assert_close(rounded, weight, atol=0, rtol=1 / 15 if format.grouped else 0.01)


@pytest.mark.parametrize("row", ["llama", "llama-all-heads", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "smollm3"])
@pytest.mark.parametrize("method", ["awq", "smooth"])
def test_scales_leave_the_model_as_it_is(row: str, method: str) -> None:
    """Norms that multiply by 1 + weight, biases, shared heads and layers without a norm before them."""
    model = build(row)
    ids = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
    expected = model(ids).logits
    args = AWQ.scheme(32).weights
    assert args
    choose = scaling.awq(args, torch.float32) if method == "awq" else scaling.smooth
    moved = 0
    for number, layer in enumerate(layers.decoder_layers(model)):
        linear = {f"{name}": module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        known = LayerPass(model, ids).gather(0, linear) if number == 0 else statistics_for(linear)
        for pair in scaling.pairs(layer, "", set(linear)):
            scales = choose([linear[name].weight.float() for name in pair.after], known[pair.after[0]])
            moved += int((scaling.apply(pair, linear, scales, row.startswith("gemma"), torch.float32) != 1).sum())
    assert moved > 0
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-3, rtol=2e-3)


def statistics_for(linear: dict[str, nn.Linear]) -> dict[str, Statistics]:
    return {name: statistics_of(correlated(module.in_features)) for name, module in linear.items()}


def test_awq_and_gptq_lose_less_than_rounding_to_nearest() -> None:
    rows = torch.randint(0, VOCAB, (16, 32), generator=torch.Generator().manual_seed(4))
    assert output_error("w4a16-awq", rows) < 0.9 * output_error("w4a16-awq", None)
    assert output_error("w4a16-gptq", rows) < 0.9 * output_error("w4a16-awq", None)


def output_error(name: str, rows: Tensor | None) -> float:
    """Mean square of the change of the hidden states, without calibration if there are no rows."""
    model: Any = build("llama")
    ids = torch.randint(0, VOCAB, (8, 32), generator=torch.Generator().manual_seed(5))
    expected = model.base_model(ids).last_hidden_state.clone()
    plan = layers.plan(model, FORMATS[name], None, False)
    if rows is None:
        for layer in plan.quantized:
            args = plan.format.scheme(plan.group_size).weights
            assert args
            module = model.get_submodule(layer)
            module.weight.data.copy_(grid.fit(module.weight, args, torch.bfloat16).round(module.weight))
    else:
        Rounding(model, plan, torch.bfloat16).run(rows, lambda: None)
    return float((model.base_model(ids).last_hidden_state - expected).square().mean())


def test_layers_with_the_same_input_share_statistics() -> None:
    model = build("llama")
    layer = layers.decoder_layers(model)[0]
    linear = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    found = LayerPass(model, torch.randint(0, VOCAB, (3, 16))).gather(0, linear)
    assert found["self_attn.q_proj"] is found["self_attn.k_proj"] is found["self_attn.v_proj"]
    assert found["mlp.gate_proj"] is found["mlp.up_proj"]
    assert len({id(each) for each in found.values()}) == 4
    assert {each.tokens for each in found.values()} == {3 * 16}


def test_a_pass_layer_by_layer_is_the_whole_forward_pass() -> None:
    """Windows and rotary embeddings differ between the kinds of layers in Gemma 3."""
    for row in ("gemma3", "smollm3-sliding", "qwen3-sliding"):
        model = build(row)
        ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(6))
        hidden = LayerPass(model, ids)
        count = len(layers.decoder_layers(model))
        for number in range(count):
            hidden.advance(number)
        for state, one in zip(hidden._states, ids, strict=True):
            torch.testing.assert_close(model.base_model.norm(state), model.base_model(one[None]).last_hidden_state)
