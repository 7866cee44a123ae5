"""gelu(x @ weight.T + bias), by tanh, in one pass: cuBLASLt applies the activation to its accumulators.

torch has the same as `_addmm_activation`, but its compiler takes that apart again and writes and reads the product in between. An
operator stays as it is. For inference: it has no gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.ops.on_device import on_tensor_device


def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def linear_gelu_cublas(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return torch.unflatten(rows, 0, x.shape[:-1])


library = torch.library.Library("strata", "FRAGMENT")
library.define("linear_gelu(Tensor x, Tensor weight, Tensor bias) -> Tensor")
library.impl("linear_gelu", reference, "CPU")
library.impl("linear_gelu", on_tensor_device(linear_gelu_cublas), "CUDA")


@torch.library.register_fake("strata::linear_gelu", lib=library)
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [..., k], weight [n, k] and bias [n] of one dtype -> [..., n]."""
    return torch.ops.strata.linear_gelu(x, weight, bias)  # type: ignore[no-any-return]
