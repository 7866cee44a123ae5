"""Projections in NF4: bitsandbytes' own layer computes the same, all projections of a model are in it, and weights stream in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ROWS
from torch import nn

from strata.platform.errors import UserError
from strata.platform.recipe import PROJECTIONS, LoraSection
from strata.training.model import quantized
from strata.training.model.llama import Llama
from strata.training.model.lora import LoraLinear
from strata.training.model.quantized import Nf4Linear

from .families.folders import imported, save

LORA = LoraSection(rank=3, targets=("q_proj",), base="nf4")


@pytest.fixture
def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes")


def test_without_bitsandbytes_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    section = imported(save(ROWS["qwen3"], tmp_path))
    with pytest.raises(UserError, match="needs bitsandbytes, which is not here"), torch.device("meta"):
        Llama(section, None, "torch", LORA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitsandbytes_own_layer_computes_the_same(bitsandbytes: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(128, 96).to(dtype), torch.randn(2, 7, 128, dtype=dtype, requires_grad=True)
    theirs = bitsandbytes.nn.Linear4bit(128, 96, compute_dtype=dtype, quant_type="nf4", compress_statistics=True)
    theirs.load_state_dict(plain.state_dict())
    theirs.to("cpu")
    ours = Nf4Linear(plain)
    assert not ours.filled
    ours.fill(plain.weight)
    assert ours.filled
    for module in (ours, theirs):
        y = module(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y, nn.functional.linear(x, ours.dequantized(), plain.bias), rtol=1e-2, atol=1e-2)
    gradients = [torch.autograd.grad(module(x).square().sum(), x)[0] for module in (ours, theirs)]
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(gradients[0], gradients[1])
    error = (ours.dequantized() - plain.weight).abs().max() / plain.weight.abs().max()
    assert 0 < error < 0.2  # half of NF4's widest gap


def test_double_quantization_needs_half_a_byte(bitsandbytes: Any) -> None:
    module = Nf4Linear(nn.Linear(1024, 512, bias=False))
    module.fill(torch.randn(512, 1024))
    state = module._state
    held = [module._packed, state.absmax, state.state2.absmax]
    tables = 2 * 1024  # the codes of both levels
    assert sum(tensor.nbytes for tensor in held) <= 512 * 1024 * (0.5 + 1 / 64 + 4 / (64 * 256)) + tables


def test_all_projections_are_quantized_and_hold_nothing_before_a_load(bitsandbytes: Any, tmp_path: Path) -> None:
    section = imported(save(ROWS["qwen3"], tmp_path))
    with torch.device("meta"):
        model = Llama(section, None, "torch", LORA)
    found = {name: module for name, module in model.named_modules() if isinstance(module, Nf4Linear)}
    assert len(found) == section.layers * len(PROJECTIONS) and not any(module.filled for module in found.values())
    assert all(name.split(".")[-1] == "base" if "q_proj" in name else not name.endswith("base") for name in found)
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert len(adapted) == section.layers
    weights = [name for name, _ in model.named_parameters() if any(f"{kind}.weight" in name for kind in PROJECTIONS)]
    assert not weights, "quantized weights are no parameters"
