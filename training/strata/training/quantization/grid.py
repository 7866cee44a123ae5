"""Grid of values that quantized weights can have: scales and zero points of each group of input columns."""

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

SHRINKS = tuple(1 - step / 40 for step in range(13))  # of the range: clipping a few weights can make the others more exact


@dataclass(frozen=True)
class Grid:
    """`scale` and `zero` are [outputs, groups]. `scale` is rounded to the numeric type in which it is stored."""

    scale: Tensor
    zero: Tensor
    args: QuantizationArgs

    def round(self, weight: Tensor) -> Tensor:
        """Nearest values of a weight [outputs, inputs], in float32."""
        rounded: Tensor = fake_quantize(weight.float(), self.scale.float(), self.zero, self.args)
        return rounded


def fit(weight: Tensor, args: QuantizationArgs, stored: torch.dtype, importance: Tensor | None = None) -> Grid:
    """Grid over the range of each group. With the importance [inputs] of each column, such as the mean square of its activations,
    the range of a group is shrunk to where the weighted squared error is least."""
    groups = weight.float().reshape(len(weight), -1, args.group_size or weight.shape[1])  # [outputs, groups, columns]
    low, high = groups.amin(2), groups.amax(2)
    best = _grid(low, high, args, stored)
    if importance is None:
        return best
    weights = importance.float().reshape(-1, groups.shape[2])  # [groups, columns]
    least = _error(best, weight, weights)
    for shrink in SHRINKS[1:]:
        other = _grid(low * shrink, high * shrink, args, stored)
        error = _error(other, weight, weights)
        better = error < least
        least = torch.where(better, error, least)
        best = Grid(torch.where(better, other.scale, best.scale), torch.where(better, other.zero, best.zero), args)
    return best


def _grid(low: Tensor, high: Tensor, args: QuantizationArgs, stored: torch.dtype) -> Grid:
    scale, zero = calculate_qparams(low, high, args)
    return Grid(scale.to(stored), zero, args)


def _error(grid: Grid, weight: Tensor, weights: Tensor) -> Tensor:
    """Weighted squared error of each group, [outputs, groups]."""
    difference = (grid.round(weight) - weight.float()).reshape(len(weight), *weights.shape)
    return (difference.square() * weights).sum(2)
