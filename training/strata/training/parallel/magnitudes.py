"""Lengths of the rows of projections with DoRA, from the weights that a rank's engine holds, whatever the layout."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strata.platform.recipe import ModelSection, ParallelSection
from strata.training.model.dora import DoraLinear
from strata.training.model.quantized import Nf4Linear
from strata.training.parallel.shard_map import Shard, whole_name


class Magnitudes:
    """Source of the magnitudes with which an adapted model is its base: the lengths of the base's rows. Made after the base's
    weights are loaded, on all ranks: it also sets the part of the norms that does not change."""

    def __init__(self, engine: Any, model: ModelSection, parallel: ParallelSection) -> None:
        self._lengths: dict[str, Tensor] = {}
        for name, module in engine.module.named_modules():
            if isinstance(module, DoraLinear):
                module.weight_squares = _squares(module.base)
                lengths = module.weight_squares.sqrt()
                self._lengths[whole_name(f"{name}.lora_magnitude_vector", model, parallel)] = lengths

    def read_range(self, shard: Shard, kind: str, first: int, last: int) -> Tensor:
        if kind != "weight":
            return torch.zeros(last - first)
        return self._lengths[shard.name][first:last]


def gather_with_projections(module: nn.Module) -> None:
    """ZeRO-3 gathers a parameter when its own module is called, and DoRA reads those of the modules in it."""
    from deepspeed.runtime.zero import register_external_parameter

    for each in module.modules():
        if isinstance(each, DoraLinear):
            for parameter in (each.lora_A.weight, each.lora_B.weight, each.base.bias):
                if parameter is not None:
                    register_external_parameter(each, parameter)


@torch.no_grad()
def _squares(base: nn.Module) -> Tensor:
    """Sum of squares of each row, over all tensor-parallel ranks, in fp32."""
    from deepspeed.module_inject.layers import LinearAllreduce
    from deepspeed.runtime.zero import GatheredParameters

    if isinstance(base, Nf4Linear):
        return base.dequantized().float().square().sum(1)
    with GatheredParameters([base.weight], enabled=hasattr(base.weight, "ds_id")):
        squares = base.weight.detach().float().square().sum(1)  # type: ignore[operator]
    if isinstance(base, LinearAllreduce):
        dist.all_reduce(squares, group=base.mp_group)
    return squares
