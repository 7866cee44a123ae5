"""Initial weights as a source for a load: any rank reads its own part of a parameter, whatever the layout."""

import torch
from torch import Tensor

from strata.platform.recipe import ModelSection
from strata.training.model.llama import initialize
from strata.training.parallel.shard_map import Shard


class Initial:
    """Weights of a new model or adapter, with moments of zero."""

    def __init__(self, section: ModelSection, seed: int) -> None:
        self._section, self._seed = section, seed

    def read_range(self, shard: Shard, kind: str, first: int, last: int) -> Tensor:
        if kind != "weight":
            return torch.zeros(last - first)
        whole = torch.empty(shard.shape)
        initialize(shard.name, whole, self._section, self._seed)
        return shard.of(whole).reshape(-1)[first:last]
