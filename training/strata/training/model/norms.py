"""RMSNorm, and Gemma's variant of it."""

import torch
from torch import Tensor, nn

from strata.platform.recipe import ModelSection
from strata.training.model.ops import Ops


class RMSNorm(nn.Module):
    """Norm of the last dimension. With `offset`, it multiplies by one plus its weight."""

    def __init__(self, width: int, eps: float, ops: Ops, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.eps = eps
        self.ops = ops
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight + 1 if self.offset else self.weight, self.eps)


def norm(section: ModelSection, width: int, ops: Ops) -> RMSNorm:
    return RMSNorm(width, section.norm_eps, ops, section.architecture.norm_offset)
