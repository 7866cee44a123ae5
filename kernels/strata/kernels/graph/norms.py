"""RMSNorm, alone or after a residual addition.

The pattern is Hugging Face's: statistics in fp32, normalised values rounded to the input's dtype, then multiplied by the weight.
Its anchor is the mean of squares.
"""

import operator

import torch
from torch import fx

from strata.kernels.graph.nodes import (
    DTYPES,
    argument,
    call,
    calls,
    in_order,
    is_last,
    like,
    only_user,
    operands,
    operation,
    other_operand,
    require_no_mutation,
    same_shape,
    tensor,
    without_cast,
)
from strata.kernels.graph.record import NoMatch
from strata.kernels.graph.rewriting import Rewriting
from strata.kernels.ops.rms_norm.rms_norm import LARGEST_WIDTH


def fuse(rewriting: Rewriting) -> None:
    for mean in calls(rewriting.graph, "mean"):
        if operation(mean.args[0]) in ("pow", "square") or _squares(mean.args[0]):
            rewriting.attempt("rms_norm", mean, _replace)


def _squares(node: object) -> bool:
    return isinstance(node, fx.Node) and operation(node) == "mul" and len(node.args) == 2 and node.args[0] is node.args[1]


def _replace(rewriting: Rewriting, mean: fx.Node) -> None:
    square = mean.args[0]
    assert isinstance(square, fx.Node)
    wide = square.args[0]
    if operation(square) == "pow" and argument(square, 1, "exponent") != 2:
        raise NoMatch("the mean is not of squares")
    if not isinstance(wide, fx.Node) or not is_last(argument(mean, 1, "dim"), tensor(wide).dim()):
        raise NoMatch("the mean is not over the last dimension")
    if not argument(mean, 2, "keepdim", False):
        raise NoMatch("the mean drops the last dimension")
    if tensor(mean).dtype != torch.float32:
        raise NoMatch(f"the mean of squares is in {tensor(mean).dtype}, not in fp32")
    x, cast = without_cast(wide)
    only_user(square)
    add = only_user(mean)
    if operation(add) != "add" or not isinstance(eps := other_operand(add, mean), float):
        raise NoMatch(f"eps is not added to the mean of squares, which is followed by '{operation(add)}'")
    root = only_user(add)
    if operation(root) != "rsqrt":
        raise NoMatch(f"'{operation(root)}' follows the mean of squares, not rsqrt")
    scaled = only_user(root)
    if operation(scaled) != "mul" or other_operand(scaled, root) is not wide:
        raise NoMatch("the inverse root does not multiply the values of which it is the mean")
    normal = only_user(scaled)
    rounded = [normal] if without_cast(normal)[1] else []
    product = only_user(normal) if rounded else normal
    if operation(product) != "mul":
        raise NoMatch(f"'{operation(product)}' follows the normalised values, not a product with the weight")
    weight = other_operand(product, rounded[0] if rounded else scaled)
    _check(x, scaled, rounded, product, weight)
    if cast and len(wide.users) != (3 if _squares(square) else 2):
        raise NoMatch(f"'{wide.name}' is also used elsewhere")
    nodes = [*cast, square, mean, add, root, scaled, *rounded, product]
    addition = _residual_addition(x)
    first = addition if addition is not None else nodes[0]
    require_no_mutation(first, product)
    if addition is not None and in_order(rewriting.graph, [first, weight])[0] is weight:
        rewriting.replace("add_rms_norm", [addition, *nodes], lambda: _add_rms_norm(addition, product, weight, eps), first=True)
    else:
        rewriting.replace("rms_norm", nodes, lambda: _rms_norm(x, product, weight, eps))


def _check(x: fx.Node, scaled: fx.Node, rounded: list[fx.Node], product: fx.Node, weight: object) -> None:
    dtype = tensor(x).dtype
    if dtype not in DTYPES:
        raise NoMatch(f"the input is {dtype}")
    if tensor(rounded[0] if rounded else scaled).dtype != dtype:
        raise NoMatch(f"normalised values are not rounded to {dtype} before they are multiplied by the weight")
    if not isinstance(width := tensor(x).shape[-1], int) or width > LARGEST_WIDTH:
        raise NoMatch(f"rows of {width} values are not of a fixed width up to {LARGEST_WIDTH}")
    if not isinstance(weight, fx.Node) or not same_shape(tensor(weight).shape, tensor(x).shape[-1:]):
        raise NoMatch("the weight is no vector of the width of the rows")
    if tensor(weight).dtype != dtype or tensor(product).dtype != dtype:
        raise NoMatch(f"the weight is {tensor(weight).dtype}, the input {dtype}")


def _residual_addition(x: fx.Node) -> fx.Node | None:
    """The addition that computes x, if it adds two tensors of x's shape and dtype."""
    if operation(x) != "add" or len(x.args) != 2 or x.kwargs:
        return None
    for term in operands(x):
        value = term.meta.get("example_value") if isinstance(term, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.dtype != tensor(x).dtype or not same_shape(value.shape, tensor(x).shape):
            return None
    return x


def _rms_norm(x: fx.Node, product: fx.Node, weight: fx.Node, eps: float) -> list[tuple[fx.Node, fx.Node]]:
    norm = call(x.graph, torch.ops.strata.rms_norm.default, (x, weight, eps), product)
    return [(product, like(x.graph.call_function(operator.getitem, (norm, 0)), product))]


def _add_rms_norm(addition: fx.Node, product: fx.Node, weight: fx.Node, eps: float) -> list[tuple[fx.Node, fx.Node]]:
    graph = addition.graph
    residual, x = addition.args
    norm = call(graph, torch.ops.strata.add_rms_norm.default, (x, residual, weight, eps), product)
    normal = like(graph.call_function(operator.getitem, (norm, 0)), product)
    total = like(graph.call_function(operator.getitem, (norm, 1)), addition)
    return [(addition, total), (product, normal)]
