"""Map from a rank's parameters to shards of the whole model. Every layout is described in terms of the whole model's parameters
under their Hugging Face names, so a checkpoint of one layout loads in any other."""

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from strata.platform.recipe import ModelSection, ParallelSection
from strata.training.layout import Place
from strata.training.model import lora
from strata.training.parallel import pipeline, tensor

if TYPE_CHECKING:
    from torch import Tensor

EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # AutoEP's names for a layer's stacked experts


@dataclass(frozen=True)
class Cut:
    """Rows (or columns) `start` to `stop` of a parameter's dimension `dim`."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """A parameter of the whole model, or a slice of one, stored in a local parameter from element `offset` on."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    cut: Cut | None
    offset: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.cut is None:
            return self.shape
        size = self.cut.stop - self.cut.start
        return tuple(size if dim == self.cut.dim else whole for dim, whole in enumerate(self.shape))

    @property
    def numel(self) -> int:
        return prod(self.local_shape)

    def of(self, whole: "Tensor") -> "Tensor":
        """This shard of the whole parameter."""
        return whole if self.cut is None else whole.narrow(self.cut.dim, self.cut.start, self.cut.stop - self.cut.start)


def whole_name(name: str, model: ModelSection, parallel: ParallelSection) -> str:
    """Name in the whole model of a rank's parameter, except for AutoEP's stacked experts, which are several parameters."""
    name = lora.without_base(name)
    if parallel.pipeline > 1:
        return pipeline.whole_name(name, model)
    if parallel.expert > 1:
        name = name.replace(".mlp.router.gate.", ".mlp.gate.").replace(".mlp.shared_experts", ".mlp.shared_expert")
    return name


def local_shards(name: str, shape: tuple[int, ...], model: ModelSection, parallel: ParallelSection, place: Place) -> list[Shard]:
    """Shards in the rank's parameter `name`. `shape` is its shape before ZeRO's partition."""
    if parallel.expert > 1 and (match := re.fullmatch(r"(.*\.mlp\.experts)\.(w[123])", name)):
        count, *expert_shape = shape
        first = place.data % parallel.expert * count
        return [
            Shard(f"{match[1]}.{first + i}.{EXPERT_PARTS[match[2]]}.weight", tuple(expert_shape), None, i * prod(expert_shape))
            for i in range(count)
        ]
    name = whole_name(name, model, parallel)
    dim = tensor.split_dimension(name) if parallel.tensor > 1 else None
    if dim is None:
        return [Shard(name, shape, None, 0)]
    size = shape[dim]
    whole = tuple(length * parallel.tensor if d == dim else length for d, length in enumerate(shape))
    return [Shard(name, whole, Cut(dim, place.tensor * size, (place.tensor + 1) * size), 0)]
