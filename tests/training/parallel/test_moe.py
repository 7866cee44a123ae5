"""Mixture of experts against `transformers` and DeepSpeed, and its balance loss against autograd."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from strata.planner.catalogue.library import from_recipe, open_model
from strata.platform.recipe import ModelSection
from strata.training.checkpoint.export import write_folder
from strata.training.model import balance
from strata.training.model.feed_forward import MoE
from strata.training.model.llama import Llama, initialize, token_losses
from strata.training.parallel import expert

BASE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 512, "context": 32}
SHAPES = {
    "mixtral": BASE | {"moe": {"experts": 8, "top_k": 2, "balance": 0.1}},
    "mixtral untied": BASE | {"moe": {"experts": 4, "top_k": 3, "balance": 0.1}, "tie_embeddings": False},
    "qwen2": BASE | {"moe": {"experts": 8, "top_k": 2, "shared_ffn": 40, "balance": 0.1}},
    "qwen2 untied": BASE | {"moe": {"experts": 4, "top_k": 1, "shared_ffn": 40, "balance": 0.1}, "tie_embeddings": False},
}


@pytest.fixture(params=SHAPES)
def section(request: pytest.FixtureRequest) -> ModelSection:
    return ModelSection.model_validate(SHAPES[request.param])


def noisy_model(section: ModelSection, seed: int = 0) -> Llama:
    """Model with noise on all weights, norms included, so that routers have preferences and errors are visible."""
    model, noise = Llama(section, seed), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return model


def random_tokens(section: ModelSection, sequences: int) -> Tensor:
    return torch.randint(0, section.vocab, (sequences, section.context + 1), generator=torch.Generator().manual_seed(2))


def cross_entropy(model: nn.Module, tokens_bt: Tensor) -> Tensor:
    return token_losses(model(tokens_bt[:, :-1]), tokens_bt[:, 1:]).mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def mixtures(model: nn.Module) -> Iterator[MoE]:
    return (module for module in model.modules() if isinstance(module, MoE))


def test_logits_equal_transformers_on_the_export(section: ModelSection, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = noisy_model(section)
    write_folder(tmp_path, ours.state_dict(), section, torch.float32)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens_bt = random_tokens(section, 2)[:, :-1]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens_bt), theirs(tokens_bt).logits, atol=1e-4, rtol=0)
    shared = section.moe is not None and section.moe.shared_ffn
    assert type(theirs).__name__ == ("Qwen2MoeForCausalLM" if shared else "MixtralForCausalLM")


def test_parameters_are_counted_without_building(section: ModelSection) -> None:
    model, moe = Llama(section), section.moe
    assert moe is not None
    idle = sum(p.numel() for m in mixtures(model) for expert in list(m.experts)[moe.top_k :] for p in expert.parameters())
    total = sum(p.numel() for p in model.parameters())
    shape = from_recipe(section, "mixture")
    assert (shape.parameters(), shape.active_parameters()) == (total, total - idle)


def test_every_parameter_has_its_own_seed(section: ModelSection) -> None:
    """So a pipeline stage, or a worker with some of the experts, initializes its part of the same model."""
    whole = dict(Llama(section, seed=3).named_parameters())
    for name, parameter in reversed(whole.items()):
        again = torch.ones_like(parameter)
        initialize(name, again, section, seed=3)
        assert torch.equal(again, parameter)
    drawn = {name: parameter for name, parameter in whole.items() if parameter.dim() > 1}
    assert len({parameter[0, 0].item() for parameter in drawn.values()}) == len(drawn)
    other = dict(Llama(section, seed=4).named_parameters())
    assert not any(torch.equal(parameter, other[name]) for name, parameter in drawn.items())
    assert whole["model.layers.1.mlp.gate.weight"].std().item() == pytest.approx(0.02, rel=0.2)
    assert whole["model.layers.1.mlp.experts.0.gate_proj.weight"].std().item() == pytest.approx(1 / 8, rel=0.1)


def test_initial_values_are_stable(section: ModelSection) -> None:
    """Initial values do not depend on the process or the Python version: resumed layouts and published losses rely on them."""
    weight = torch.empty(4, 4)
    initialize("model.layers.0.mlp.experts.1.up_proj.weight", weight, section, seed=5)
    torch.testing.assert_close(weight[0], torch.tensor([-0.122568, 0.000405, 0.250036, -0.614364]), atol=1e-6, rtol=0)


def test_experts_without_tokens_have_zero_gradients(section: ModelSection) -> None:
    model, moe = noisy_model(section), section.moe
    assert moe is not None
    with torch.no_grad():
        for mixture in mixtures(model):
            mixture.gate.weight.zero_()  # ties: every token is routed to the same experts
    cross_entropy(model, random_tokens(section, 2)).backward()
    gradients(model)
    for mixture in mixtures(model):
        used = [all(p.grad is not None and p.grad.any() for p in expert.parameters()) for expert in mixture.experts]
        assert sum(used) == moe.top_k


def test_balance_loss_is_one_if_even_and_large_if_collapsed() -> None:
    even = torch.eye(8).repeat(1, 4, 1) * 1e-3  # 32 tokens, routed evenly, with nearly equal probabilities
    assert balance.sequence_balance(even, top_k=1).item() == pytest.approx(1, abs=1e-3)
    collapsed = torch.full((3, 16, 8), -30.0)
    collapsed[..., :2] = 5
    assert balance.sequence_balance(collapsed, top_k=2).item() == pytest.approx(8 / 2)
    both = torch.cat([even.repeat(3, 1, 1)[:, :16], collapsed])
    assert balance.sequence_balance(both, top_k=2).item() == pytest.approx((1 + 4) / 2, abs=0.1)


def explicit_gradients(model: Llama, section: ModelSection, tokens_bt: Tensor) -> dict[str, Tensor]:
    """Gradients of cross entropy plus the weighted balance loss, computed without the hooks of `balance.attach`."""
    assert section.moe is not None
    logits: list[Tensor] = []
    hooks = [mixture.gate.register_forward_hook(lambda *call: logits.append(call[2])) for mixture in mixtures(model)]
    loss = cross_entropy(model, tokens_bt)
    auxiliary = sum(balance.sequence_balance(one, section.moe.top_k) for one in logits) / section.layers
    (loss + section.moe.balance * auxiliary).backward()
    for hook in hooks:
        hook.remove()
    return gradients(model)


def recompute(model: Llama, use_reentrant: bool) -> None:
    for layer in model.model.layers:
        forward: Callable[..., Tensor] = layer.forward
        layer.forward = lambda *x, forward=forward: checkpoint(forward, *x, use_reentrant=use_reentrant)


@pytest.mark.parametrize("recomputed", ["no", "non-reentrant", "reentrant"])
def test_balance_gradient_equals_that_of_the_explicit_loss(section: ModelSection, recomputed: str) -> None:
    tokens_bt = random_tokens(section, 3)
    expected = explicit_gradients(noisy_model(section), section, tokens_bt)
    plain = noisy_model(section)
    cross_entropy(plain, tokens_bt).backward()
    ours = noisy_model(section)
    if recomputed != "no":
        recompute(ours, use_reentrant=recomputed == "reentrant")
    balance.attach(ours, section, scale=1.0)
    loss = cross_entropy(ours, tokens_bt)
    loss.backward()
    assert loss.item() == pytest.approx(
        cross_entropy(plain, tokens_bt).item(), abs=1e-6
    )  # the reported loss excludes the balance loss
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)
    gate = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(expected[gate], gradients(plain)[gate], rtol=1e-2)  # the balance loss has a visible effect


def test_balance_gradients_accumulate_over_micro_batches(section: ModelSection) -> None:
    tokens_bt = random_tokens(section, 4)
    whole, parts = noisy_model(section), noisy_model(section)
    balance.attach(whole, section, scale=1.0)
    cross_entropy(whole, tokens_bt).backward()
    balance.attach(parts, section, scale=1 / 2)
    for micro_batch in tokens_bt.split(2):
        (cross_entropy(parts, micro_batch) / 2).backward()
    for name, gradient in gradients(parts).items():
        torch.testing.assert_close(gradient, gradients(whole)[name], atol=1e-6, rtol=1e-4)


def test_balance_does_not_affect_evaluation(section: ModelSection) -> None:
    model = noisy_model(section)
    tokens_bt = random_tokens(section, 2)[:, :20]  # not a whole window
    with torch.no_grad():
        before = model(tokens_bt)
        balance.attach(model, section, scale=1.0)
        assert torch.equal(model(tokens_bt), before)


def test_deepspeeds_expert_parallel_layer_has_the_same_gradients(section: ModelSection, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed has its own routing code, which flattens the router's input. Here all experts are on one worker."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    assert section.moe is not None
    config = parse_autoep_config(expert.config(1, section.moe) | {"use_grouped_mm": False})
    ours, theirs = noisy_model(section), noisy_model(section)
    for spec, layer in zip(AutoEP(theirs, config).ep_parser(), theirs.model.layers, strict=True):
        layer.mlp = AutoEPMoELayer(spec, layer.mlp, ep_size=1, ep_rank=0, config=config)
    tokens_bt = random_tokens(section, 2)
    for model in (ours, theirs):
        balance.attach(model, section, scale=1.0)
        cross_entropy(model, tokens_bt).backward()
    torch.testing.assert_close(theirs(tokens_bt[:, :-1]), ours(tokens_bt[:, :-1]), atol=1e-5, rtol=0)
    expected, found = gradients(ours), gradients(theirs)
    for number in range(section.layers):
        mlp = f"model.layers.{number}.mlp"
        torch.testing.assert_close(found[f"{mlp}.router.gate.weight"], expected[f"{mlp}.gate.weight"], atol=1e-6, rtol=1e-4)
        stacked = torch.stack([expected[f"{mlp}.experts.{e}.up_proj.weight"] for e in range(section.moe.experts)])
        torch.testing.assert_close(found[f"{mlp}.experts.w3"], stacked, atol=1e-6, rtol=1e-4)


def test_routers_are_found_in_a_pipeline_stage(section: ModelSection) -> None:
    tokens_bt, model = random_tokens(section, 2), noisy_model(section)
    stage = nn.ModuleDict({str(3 + number): layer for number, layer in enumerate(model.model.layers)})
    balance.attach(stage, section, scale=1.0)
    cross_entropy(model, tokens_bt).backward()
    expected = explicit_gradients(noisy_model(section), section, tokens_bt)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)


def test_laptop_moe_has_the_active_parameters_of_laptop() -> None:
    dense, mixture = open_model("laptop"), open_model("laptop-moe")
    assert mixture.active_parameters() == pytest.approx(dense.parameters(), rel=0.05)
    assert mixture.parameters() > 2 * dense.parameters()
    assert mixture.head_dim >= 32  # vLLM on a CPU has no attention for less
