"""Imported models compute what transformers computes."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tiny_models import Tiny
from torch import Tensor

from strata.platform.model_families.parameters import shapes
from strata.platform.recipe import ArchitectureSection, ModelSection
from strata.training.model.llama import Llama

from .folders import build, imported, read_all, rows, save


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))


def logits(weights: dict[str, Tensor], section: ModelSection, kernels: Literal["torch", "strata"], tokens: Tensor) -> Tensor:
    model = Llama(section, kernels=kernels)
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        found: Tensor = model(tokens)
    return found


@rows
def test_parameters_are_those_of_the_model(row: Tiny, tmp_path: Path) -> None:
    section = imported(save(row, tmp_path))
    with torch.device("meta"):
        model = Llama(section, kernels="torch")
    assert {name: tuple(weight.shape) for name, weight in model.named_parameters()} == shapes(section)


@pytest.mark.parametrize("kernels", ["torch", "strata"])
@rows
def test_logits_equal_transformers(row: Tiny, kernels: Any, tmp_path: Path, tokens: Tensor) -> None:
    section = imported(save(row, tmp_path))
    assert section.family == row.family
    with torch.no_grad():
        expected = build(row)(tokens).logits
    found = logits(read_all(tmp_path, section), section, kernels, tokens)
    assert expected.std() > 0.1  # not all alike
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def changes(section: ModelSection) -> dict[str, ModelSection]:
    """The section with one switch after the other turned off, or with a neighbouring value."""
    plain, own = ArchitectureSection(), section.architecture
    switches: dict[str, dict[str, Any]] = {
        key: {key: getattr(plain, key)} for key in ArchitectureSection.model_fields if getattr(own, key) != getattr(plain, key)
    }
    switches.pop("head_dim", None)  # decides shapes
    if own.window:
        switches["longer window"] = {"window": own.window + 1}
        switches["other sliding layers"] = {"sliding_layers": own.sliding_layers[1:]}
    changed = {name: section.model_copy(update={"architecture": own.model_copy(update=keys)}) for name, keys in switches.items()}
    changed["norm_eps"] = section.model_copy(update={"norm_eps": 2 * section.norm_eps + 1e-2})
    if len(own.unrotated_layers) < section.layers:
        changed["rope_theta"] = section.model_copy(update={"rope_theta": 2 * section.rope_theta})
    if section.moe:
        for keys in ({"normalize": not section.moe.normalize}, {"top_k": section.moe.top_k - 1}):
            changed[f"moe {keys}"] = section.model_copy(update={"moe": section.moe.model_copy(update=keys)})
    return changed


@rows
def test_every_switch_of_a_row_counts(row: Tiny, tmp_path: Path, tokens: Tensor) -> None:
    """A switch that an import forgets or misreads would fail the comparison with transformers."""
    section = imported(save(row, tmp_path))
    weights = read_all(tmp_path, section)
    right = logits(weights, section, "torch", tokens)
    for name, changed in changes(section).items():
        assert (logits(weights, changed, "torch", tokens) - right).abs().max() > 5e-3, name
