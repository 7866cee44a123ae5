"""LoRA: a trained low-rank product beside frozen projections, in peft's form.

An adapted projection is `base` (the frozen one), `lora_A` and `lora_B`, plain linear layers: tensor parallelism splits them as
it splits any other, and its own reductions make the product whole. Where no engine does anything when a layer is called, their
products are fused (`fuse`).
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from strata.kernels.ops.lora_projections import lora_projections
from strata.platform.recipe import LoraSection


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, lora: LoraSection) -> None:
        super().__init__()
        self.base = base
        device, dtype = base.weight.device, base.weight.dtype
        self.lora_A = nn.Linear(base.in_features, lora.rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(lora.rank, base.out_features, bias=False, device=device, dtype=dtype)
        self.dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        self.scale = lora.alpha / lora.rank
        self.fused = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return fused(x, [self])[0]
        y: Tensor = self.base(x) + self.lora_B(self.lora_A(self.dropout(x))) * self.scale
        return y


def fuse(model: nn.Module) -> None:
    """Fuses the products of plain adapters without dropout, beside weights that are not quantized. Their layers are then never
    called, so nothing may depend on a call: ZeRO-3 gathers a layer's weights in it, and tensor parallelism sums over ranks."""
    for module in model.modules():
        if type(module) is LoraLinear and type(module.base) is nn.Linear and isinstance(module.dropout, nn.Identity):
            module.fused = True


def all_fused(projections: Sequence[nn.Module]) -> TypeGuard[Sequence["LoraLinear"]]:
    return all(isinstance(projection, LoraLinear) and projection.fused for projection in projections)


def fused(x: Tensor, projections: Sequence[LoraLinear]) -> list[Tensor]:
    weights: list[Tensor] = [one.base.weight for one in projections]
    biases: list[Tensor | None] = [one.base.bias for one in projections]
    downs: list[Tensor] = [one.lora_A.weight for one in projections]
    ups: list[Tensor] = [one.lora_B.weight for one in projections]
    return lora_projections(x, weights, biases, downs, ups, projections[0].scale)


def without_base(name: str) -> str:
    """Name of a parameter in the model without adapters."""
    return name.replace(".base.", ".")


def is_adapter(name: str) -> bool:
    return is_product(name) or is_magnitude(name)


def is_product(name: str) -> bool:
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def is_magnitude(name: str) -> bool:
    """True for the lengths of a projection's rows, which DoRA trains."""
    return name.endswith(".lora_magnitude_vector")


def merged(weight: Tensor, lora_a: Tensor, lora_b: Tensor, lora: LoraSection) -> Tensor:
    """Weight of a projection that computes the same without its adapter, in fp32."""
    return weight.float() + (lora_b.float() @ lora_a.float()) * (lora.alpha / lora.rank)


@torch.no_grad()
def initialize(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """peft's start: B is zero, so that the adapted model is its base, and A is uniform, by its fan-in. A magnitude is left as
    it is: its start follows from the base's weights, which a load has."""
    if is_magnitude(name):
        return
    if name.endswith(".lora_B.weight"):
        weight.zero_()
    else:
        bound = weight.shape[1] ** -0.5
        weight.uniform_(-bound, bound, generator=generator)
