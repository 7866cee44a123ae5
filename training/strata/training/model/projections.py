"""Projections of one input: queries, keys and values, or gate and up.

Their gradients with respect to the input are added up within the matrix products. As separate layers, each would write its
gradient to memory, and another pass would read them all.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.kernels.ops.input_gradient import input_gradient
from strata.training.model import lora


class Projecting(nn.Module):
    """Layer with projections of one input. `fused`: they are one operation, and none of them is called as a module."""

    fused = False


def fuse(model: nn.Module) -> None:
    """Fuses projections that are plain linear layers. Then nothing may depend on a call of theirs: ZeRO-3 gathers a layer's
    weights in it, and tensor parallelism sums over ranks."""
    for module in model.modules():
        if isinstance(module, Projecting):
            module.fused = True


def projected(layer: Projecting, x: Tensor, *projections: nn.Module) -> list[Tensor]:
    if lora.all_fused(projections):
        return lora.fused(x, projections)
    if layer.fused and all(type(projection) is nn.Linear and projection.bias is None for projection in projections):
        return list(_Products.apply(x, *(projection.weight for projection in projections)))  # type: ignore[no-untyped-call]
    return [projection(x) for projection in projections]


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = [gradient.flatten(0, -2) for gradient in gradients]
        dx = input_gradient(rows, weights).view_as(x) if ctx.needs_input_grad[0] else None
        columns = x.flatten(0, -2)
        trained = ctx.needs_input_grad[1:]
        return dx, *(gradient.t() @ columns if wanted else None for gradient, wanted in zip(rows, trained, strict=True))
