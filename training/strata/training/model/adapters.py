"""Puts adapters beside a model's projections, and the projections into the form in which they are frozen."""

from torch import nn

from strata.platform.recipe import PROJECTIONS, LoraSection
from strata.training.model import quantized
from strata.training.model.dora import DoraLinear
from strata.training.model.lora import LoraLinear
from strata.training.model.quantized import Nf4Linear


def adapt(model: nn.Module, lora: LoraSection) -> None:
    """Freezes the model and puts adapters beside its target projections, also those of experts. In NF4 are all projections, as
    a frozen one needs no adapter to be quantized."""
    if lora.base == "nf4":
        quantized.require_installed()
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in PROJECTIONS and isinstance(child, nn.Linear):
                setattr(module, name, _adapted(child, lora) if name in lora.targets else _frozen(child, lora))


def _adapted(projection: nn.Linear, lora: LoraSection) -> LoraLinear:
    adapted = (DoraLinear if lora.dora else LoraLinear)(projection, lora)
    adapted.base = _frozen(projection, lora)  # type: ignore[assignment]
    return adapted


def _frozen(projection: nn.Linear, lora: LoraSection) -> nn.Module:
    return Nf4Linear(projection) if lora.base == "nf4" else projection
