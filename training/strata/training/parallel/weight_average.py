"""Moving average of a model's weights, in any layout: each rank averages the elements whose optimizer state it holds."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strata.platform.recipe import ModelSection, ParallelSection
from strata.training.parallel import optimizer_state

WARM_UP = 10  # steps after which the average's horizon is a tenth of the steps so far, until it is that of the decay


class WeightAverage:
    """Average of this rank's slots, by the names of their parameters."""

    def __init__(self, engine: Any, decay: float) -> None:
        self._weights = optimizer_state.weights(engine)
        self.values = {name: weight.clone() for name, weight in self._weights.items()}
        self._decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Adds the weights after step `step`, counted from 0."""
        decay = min(self._decay, (1 + step) / (WARM_UP + step))
        torch._foreach_lerp_(list(self.values.values()), list(self._weights.values()), 1 - decay)


def gather(engine: Any, model: ModelSection, parallel: ParallelSection) -> dict[str, Tensor]:
    """The average of the whole model on rank 0, empty on other ranks. Called by all ranks."""
    parts = [
        (part.shard, part.start, part.values.cpu())
        for part in optimizer_state.fragments(engine, model, parallel)
        if part.kind == optimizer_state.AVERAGE
    ]
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(parts, everyone)
    slices: dict[Any, Tensor] = {}  # by shard: a parameter, or a tensor-parallel slice of one
    for shard, start, values in (part for parts in everyone or () for part in parts):
        slices.setdefault(shard, torch.empty(shard.numel))[start : start + values.numel()] = values
    whole: dict[str, Tensor] = {}
    for shard, values in slices.items():
        shard.of(whole.setdefault(shard.name, torch.empty(shard.shape))).copy_(values.view(shard.local_shape))
    return whole
