"""Strata's model against `transformers` on the export, which tests both the model and the export, and kernels against each
other."""

from pathlib import Path

import pytest
import torch

from strata.planner.catalogue.library import from_recipe
from strata.platform.recipe import Kernels, ModelSection
from strata.training.checkpoint.export import write_folder
from strata.training.model.llama import Llama, token_losses
from strata.training.targets import IGNORED

BASE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 512, "context": 64, "rope_theta": 5000.0}
SHAPES = {
    "tied": BASE,
    "untied": BASE | {"tie_embeddings": False},
    "no grouping": BASE | {"kv_heads": 4},
    "one key head": BASE | {"kv_heads": 1, "tie_embeddings": False},
}


@pytest.fixture(params=SHAPES)
def section(request: pytest.FixtureRequest) -> ModelSection:
    return ModelSection.model_validate(SHAPES[request.param])


def test_parameters_are_counted_without_building(section: ModelSection) -> None:
    assert from_recipe(section, "llama").parameters() == sum(p.numel() for p in Llama(section).parameters())


@pytest.mark.parametrize("kernels", ["strata", "torch"])
def test_logits_equal_transformers_on_the_export(section: ModelSection, kernels: Kernels, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    ours = Llama(section, kernels=kernels)
    with torch.no_grad():
        for parameter in ours.parameters():  # away from the small values of a fresh model, norms included
            parameter.add_(torch.randn_like(parameter) * 0.1)
    write_folder(tmp_path, ours.state_dict(), section, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens_bt = torch.randint(0, section.vocab, (2, section.context))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens_bt), theirs(tokens_bt).logits, atol=1e-4, rtol=0)
    assert type(theirs).__name__ == "LlamaForCausalLM"


def test_attention_is_causal(section: ModelSection) -> None:
    model = Llama(section)
    tokens_bt = torch.randint(0, section.vocab, (1, 16))
    changed_bt = tokens_bt.clone()
    changed_bt[0, 10] = (changed_bt[0, 10] + 1) % section.vocab
    with torch.no_grad():
        difference_t = (model(tokens_bt) - model(changed_bt)).abs().amax(-1)[0]
    assert difference_t[:10].max() == 0 and difference_t[10:].min() > 0


def test_initial_loss_is_uniform(section: ModelSection) -> None:
    torch.manual_seed(0)
    tokens_bt = torch.randint(0, section.vocab, (4, 32))
    loss = token_losses(Llama(section)(tokens_bt[:, :-1]), tokens_bt[:, 1:]).mean()
    assert loss.item() == pytest.approx(torch.tensor(float(section.vocab)).log().item(), abs=0.3)


def test_kernels_compute_the_same_losses_and_gradients(section: ModelSection) -> None:
    torch.manual_seed(2)
    tokens_bt = torch.randint(0, section.vocab, (3, 33))
    targets_bt = tokens_bt[:, 1:].clone()
    targets_bt[0] = IGNORED  # contributes zero loss but stays in the denominator
    losses, gradients = [], []
    for kernels in ("strata", "torch"):
        model = Llama(section, seed=1, kernels=kernels)
        loss = model(tokens_bt[:, :-1], targets_bt=targets_bt)
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        torch.testing.assert_close(loss, token_losses(model(tokens_bt[:, :-1]), targets_bt).mean())
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_compiles_without_a_graph_break(section: ModelSection) -> None:
    tokens_bt = torch.randint(0, section.vocab, (2, 16))
    model = Llama(section)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(tokens_bt, targets_bt=tokens_bt)
    loss.backward()
    torch.testing.assert_close(loss, model(tokens_bt, targets_bt=tokens_bt))
