"""`strata.kernels.patch`: equal outputs and gradients, and an error that names what it does not know."""

import copy
import math
from typing import Any

import pytest
import torch
from kernels.graph.tiny_models import FAMILIES, batch, tiny
from torch import nn

import strata.kernels
from strata.kernels.graph.huggingface import UnknownModule

CHANGED = {"llama": 5, "qwen3": 9, "mixtral": 5}  # norms
PADDED = torch.tensor([[0] * 4 + [1] * 8, [1] * 12])


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_inference_equal_the_unpatched_model(family: str) -> None:
    model = tiny(family, **({"output_router_logits": True} if family == "mixtral" else {}))
    patched = copy.deepcopy(model)
    assert strata.kernels.patch(patched) == {
        "rms_norm": CHANGED[family],
        "rope": 2,
        "swiglu": 2,
        "flash_attention": 2,
        "linear_cross_entropy": 1,
    }
    ids, labels = batch(2, 12)
    options: list[dict[str, Any]] = [{}, {"num_items_in_batch": 7}, {"attention_mask": PADDED}]
    for option in options:
        losses = [each.train()(input_ids=ids, labels=labels, **option).loss for each in (model, patched)]
        assert math.isclose(losses[0].item(), losses[1].item(), rel_tol=1e-6)
        for each, loss in zip((model, patched), losses, strict=True):
            each.zero_grad()
            loss.backward()
        for one, other in zip(model.parameters(), patched.parameters(), strict=True):
            assert (one.grad - other.grad).norm() <= 1e-5 * one.grad.norm()
    with torch.no_grad():
        expected, ours = (each.eval()(input_ids=ids, labels=labels) for each in (model, patched))
    torch.testing.assert_close(ours.logits, expected.logits)
    torch.testing.assert_close(ours.loss, expected.loss)


def test_greedy_tokens_with_a_cache_are_equal() -> None:
    model = tiny("llama").eval()
    patched = copy.deepcopy(model)
    strata.kernels.patch(patched)
    ids, _ = batch(2, 5)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), patched.generate(ids, **options))


def test_training_computes_no_logits_and_other_instances_stay_as_they_are() -> None:
    model, other = tiny("llama").train(), tiny("llama").train()
    strata.kernels.patch(model)
    ids, labels = batch(1, 8)
    assert model(input_ids=ids, labels=labels).logits is None
    assert other(input_ids=ids, labels=labels).logits is not None
    assert other.config._attn_implementation != "strata"


class OtherNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_unknown_modules_are_named() -> None:
    model = tiny("llama")
    model.model.layers[1].input_layernorm = OtherNorm()
    with pytest.raises(UnknownModule, match=r"'model\.layers\.1\.input_layernorm', a .*OtherNorm"):
        strata.kernels.patch(model)
    assert "forward" not in vars(model.model.layers[0].input_layernorm)  # nothing was changed


def test_settings_without_an_operation_are_named() -> None:
    with pytest.raises(UnknownModule, match=r"act_fn.*GELU"):
        strata.kernels.patch(tiny("llama", hidden_act="gelu"))
    with pytest.raises(UnknownModule, match=r"dropout of 0\.1"):
        strata.kernels.patch(tiny("llama", attention_dropout=0.1))
    with pytest.raises(UnknownModule, match="got LlamaModel"):
        strata.kernels.patch(tiny("llama").model)
    model = tiny("qwen3")
    strata.kernels.patch(model)
    with pytest.raises(UnknownModule, match="patched before"):
        strata.kernels.patch(model)
