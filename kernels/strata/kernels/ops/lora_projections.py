"""LoRA projections of one input in as few passes over memory as matrix products allow.

The products of adapters are as thin as their rank, so they cost memory traffic rather than arithmetic. Here each is added into
the result of the base product in place, and the gradients of one input by several projections (queries, keys and values) are
accumulated in place too. torch's own graph writes each product apart and adds them in further passes.
"""

from typing import Any

import torch
from torch import Tensor


def reference(
    x_nd: Tensor, weights: list[Tensor], biases: list[Tensor | None], downs: list[Tensor], ups: list[Tensor], scale: float
) -> list[Tensor]:
    return [
        torch.nn.functional.linear(x_nd, weight, bias) + x_nd @ down.T @ up.T * scale
        for weight, bias, down, up in zip(weights, biases, downs, ups, strict=True)
    ]


def forward(
    x_nd: Tensor, weights: list[Tensor], biases: list[Tensor | None], downs: list[Tensor], ups: list[Tensor], scale: float
) -> tuple[list[Tensor], Tensor]:
    """Returns the projections, and the input's products with all `downs` [tokens, sum of ranks]."""
    inner = x_nd @ torch.cat(downs).T
    ranks = [down.shape[0] for down in downs]
    outputs = []
    for weight, bias, up, part in zip(weights, biases, ups, inner.split(ranks, 1), strict=True):
        output = x_nd @ weight.T if bias is None else torch.addmm(bias, x_nd, weight.T)
        outputs.append(output.addmm_(part, up.T, alpha=scale))
    return outputs, inner


def backward(
    doutputs: list[Tensor],
    x_nd: Tensor,
    inner: Tensor,
    weights: list[Tensor],
    downs: list[Tensor],
    ups: list[Tensor],
    scale: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the input, of `downs` and of `ups`."""
    ranks = [down.shape[0] for down in downs]
    dinner = torch.empty_like(inner)
    dups = []
    for doutput, up, part, dpart in zip(doutputs, ups, inner.split(ranks, 1), dinner.split(ranks, 1), strict=True):
        torch.mm(doutput, up, out=dpart).mul_(scale)
        dups.append((doutput.T @ part).mul_(scale))
    dx_nd = doutputs[0] @ weights[0]
    for doutput, weight in zip(doutputs[1:], weights[1:], strict=True):
        dx_nd.addmm_(doutput, weight)
    dx_nd.addmm_(dinner, torch.cat(downs))
    ddowns = [part.clone() for part in (dinner.T @ x_nd).split(ranks)]
    return dx_nd, ddowns, dups


library = torch.library.Library("strata", "FRAGMENT")
library.define(
    "lora_projections(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[] downs, Tensor[] ups, float scale)"
    " -> (Tensor[] outputs, Tensor inner)"
)
library.define(
    "lora_projections_backward(Tensor[] doutputs, Tensor x, Tensor inner, Tensor[] weights, Tensor[] downs, Tensor[] ups,"
    " float scale) -> (Tensor dx, Tensor[] ddowns, Tensor[] dups)"
)
for device in ("CPU", "CUDA"):
    library.impl("lora_projections", forward, device)
    library.impl("lora_projections_backward", backward, device)


@torch.library.register_fake("strata::lora_projections", lib=library)
def _fake_forward(x: Tensor, weights: list[Tensor], _: Any, downs: list[Tensor], *__: Any) -> tuple[list[Tensor], Tensor]:
    tokens = x.shape[0]
    return [x.new_empty(tokens, weight.shape[0]) for weight in weights], x.new_empty(tokens, sum(d.shape[0] for d in downs))


@torch.library.register_fake("strata::lora_projections_backward", lib=library)
def _fake_backward(
    _: Any, x: Tensor, __: Any, ___: Any, downs: list[Tensor], ups: list[Tensor], ____: float
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return torch.empty_like(x), [torch.empty_like(down) for down in downs], [torch.empty_like(up) for up in ups]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
    x, weights, _, downs, ups, ctx.scale = inputs
    ctx.count = len(weights)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], *weights, *downs, *ups)


def _gradients(ctx: Any, doutputs: list[Tensor], _: None) -> tuple[Any, ...]:
    x, inner, *matrices = ctx.saved_tensors
    weights, downs, ups = (matrices[first : first + ctx.count] for first in range(0, len(matrices), ctx.count))
    doutputs = [doutput.contiguous() for doutput in doutputs]
    dx, ddowns, dups = torch.ops.strata.lora_projections_backward(doutputs, x, inner, weights, downs, ups, ctx.scale)
    return dx, [None] * ctx.count, None, ddowns, dups, None


torch.library.register_autograd("strata::lora_projections", _gradients, setup_context=_setup_context, lib=library)


def lora_projections(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], downs: list[Tensor], ups: list[Tensor], scale: float
) -> list[Tensor]:
    """Projections of x [..., width] by frozen weights, each with an adapter: x @ weight.T + bias + scale * x @ down.T @ up.T."""
    outputs, _ = torch.ops.strata.lora_projections(x.reshape(-1, x.shape[-1]), weights, biases, downs, ups, scale)
    return [output.view(*x.shape[:-1], output.shape[-1]) for output in outputs]
