"""Gradient of an input that several projections read: the sum of their products, added up within the products.

torch's compiler adds products in a pass of their own, or copies the first one before it adds the second. An operator adds in
place.
"""

import torch
from torch import Tensor

from strata.kernels.ops.on_device import on_tensor_device


def reference(doutputs: list[Tensor], weights: list[Tensor]) -> Tensor:
    return torch.stack([doutput @ weight for doutput, weight in zip(doutputs, weights, strict=True)]).sum(0)


def in_place(doutput: Tensor, doutputs: list[Tensor], weights: list[Tensor]) -> Tensor:
    dx_nd = doutput @ weights[0]
    for other, weight in zip(doutputs, weights[1:], strict=True):
        dx_nd.addmm_(other, weight)
    return dx_nd


library = torch.library.Library("strata", "FRAGMENT")
library.define("input_gradient(Tensor doutput, Tensor[] doutputs, Tensor[] weights) -> Tensor")
library.impl("input_gradient", in_place, "CPU")
library.impl("input_gradient", on_tensor_device(in_place), "CUDA")


@torch.library.register_fake("strata::input_gradient", lib=library)
def _(doutput: Tensor, doutputs: list[Tensor], weights: list[Tensor]) -> Tensor:
    return doutput.new_empty(doutput.shape[0], weights[0].shape[1])


def input_gradient(doutputs: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Sum of doutput [tokens, n] @ weight [n, width] over projections, [tokens, width]."""
    return torch.ops.strata.input_gradient(doutputs[0], doutputs[1:], weights)  # type: ignore[no-any-return]
