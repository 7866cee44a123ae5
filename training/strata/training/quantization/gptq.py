"""GPTQ: rounds a weight column by column and lets later columns compensate the error of earlier ones (arXiv:2210.17323).

Columns are rounded in the order of their activations' mean square, and scales come from the original weight, so that groups are
contiguous and the folder needs no permutation (`actorder: static` elsewhere).
"""

import torch
from compressed_tensors.quantization.utils import calculate_range
from torch import Tensor

from strata.training.quantization.grid import Grid

BLOCK = 128  # columns whose errors reach the columns after the block in one product
DAMPING = (0.01, 0.1, 1.0)  # of the mean of the diagonal; the next if the matrix is not positive definite


def gptq(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """Values of the grid, [outputs, inputs], that keep `weight @ x` for activations with the second moments `hessian`."""
    order = hessian.diagonal().argsort(descending=True)
    low, high = (float(bound) for bound in calculate_range(grid.args, weight.device))
    groups = order // (grid.args.group_size or weight.shape[1])
    scales, zeros = grid.scale.float()[:, groups], grid.zero.float()[:, groups]  # [outputs, inputs], in order
    current = weight.float()[:, order]
    inverse = _inverse_factor(hessian[order][:, order])
    result = torch.empty_like(current)
    for begin in range(0, current.shape[1], BLOCK):
        end = min(begin + BLOCK, current.shape[1])
        block, factor = current[:, begin:end].clone(), inverse[begin:end, begin:end]
        errors = torch.empty_like(block)
        for column in range(end - begin):
            scale, zero = scales[:, begin + column], zeros[:, begin + column]
            original = block[:, column].clone()
            rounded = ((original / scale + zero).round().clamp(low, high) - zero) * scale
            result[:, begin + column] = rounded
            errors[:, column] = (original - rounded) / factor[column, column]
            block[:, column:] -= errors[:, column, None] * factor[column, None, column:]
        current[:, end:] -= errors @ inverse[begin:end, end:]
    return result[:, order.argsort()]


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()  # a view
    diagonal[diagonal == 0] = 1.0  # an input that is always zero: its weights do not matter
    mean = diagonal.mean()
    for damping in DAMPING:
        damped = hessian + damping * mean * torch.eye(len(hessian), device=hessian.device)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            break
    else:
        raise ArithmeticError("the activations of a layer are not finite")
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if failed:
        raise ArithmeticError("the activations of a layer cannot be inverted")
    return factor
