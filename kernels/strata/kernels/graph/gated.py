"""silu(gate) x up, in a feed-forward layer or between the matrix products of experts."""

import torch
from torch import fx

from strata.kernels.graph.nodes import (
    DTYPES,
    calls,
    like,
    only_user,
    operation,
    other_operand,
    require_no_mutation,
    same_shape,
    tensor,
)
from strata.kernels.graph.record import NoMatch
from strata.kernels.graph.rewriting import Rewriting


def fuse(rewriting: Rewriting) -> None:
    for activation in calls(rewriting.graph, "silu", "gelu", "relu"):
        rewriting.attempt("swiglu", activation, _replace)


def _replace(rewriting: Rewriting, activation: fx.Node) -> None:
    if operation(activation) != "silu":
        raise NoMatch(f"the activation is {operation(activation)}, not silu")
    gate = activation.args[0]
    if (len(activation.args) > 1 and activation.args[1]) or activation.kwargs.get("inplace"):
        raise NoMatch("silu is in place")
    product = only_user(activation)
    if operation(product) != "mul" or product.kwargs:
        raise NoMatch(f"'{operation(product)}' follows silu, not a product")
    up = other_operand(product, activation)
    if not isinstance(gate, fx.Node) or not same_shape(tensor(gate).shape, tensor(up).shape):
        raise NoMatch("gate and up have different shapes")
    dtype = tensor(gate).dtype
    if dtype not in DTYPES or tensor(up).dtype != dtype or tensor(product).dtype != dtype:
        raise NoMatch(f"gate is {dtype}, up {tensor(up).dtype}, the product {tensor(product).dtype}")
    require_no_mutation(activation, product)

    def build() -> list[tuple[fx.Node, fx.Node]]:
        return [(product, like(product.graph.call_function(torch.ops.strata.swiglu.default, (gate, up)), product))]

    rewriting.replace("swiglu", [activation, product], build)
