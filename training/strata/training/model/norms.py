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

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x; with a residual, the norm of their sum, and the sum."""
        weight = self.weight + 1 if self.offset else self.weight
        if residual is None:
            return self.ops.rms_norm(x, weight, self.eps)
        return self.ops.add_rms_norm(x, residual, weight, self.eps)


def norm(section: ModelSection, width: int, ops: Ops) -> RMSNorm:
    return RMSNorm(width, section.norm_eps, ops, section.architecture.norm_offset)
