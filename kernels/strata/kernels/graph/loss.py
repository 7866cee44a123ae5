"""Output projection and cross-entropy loss, as in transformers' `ForCausalLMLoss`, without the logits in memory.

Between the two, logits may be cast to fp32, flattened, and cut along tokens. A cut is applied to the projection's input.
"""

import operator
from typing import Any

import torch
from torch import fx

from strata.kernels.graph.nodes import (
    CASTS,
    DTYPES,
    argument,
    call,
    calls,
    in_order,
    like,
    operation,
    require_no_mutation,
    same,
    tensor,
)
from strata.kernels.graph.record import NoMatch
from strata.kernels.graph.rewriting import Rewriting


def fuse(rewriting: Rewriting) -> None:
    for loss in calls(rewriting.graph, "cross_entropy"):
        rewriting.attempt("linear_cross_entropy", loss, _replace)


def _replace(rewriting: Rewriting, loss: fx.Node) -> None:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    defaults = (None, None, None, None, -100, None, "mean", 0.0)
    logits, targets, class_weight, average, ignored, reduces, reduction, smoothing = (
        argument(loss, place, name, default) for place, (name, default) in enumerate(zip(names, defaults, strict=True))
    )
    if class_weight is not None or average is not None or reduces is not None:
        raise NoMatch("the loss weights its classes or has an old form of reduction")
    if tensor(loss).dtype != torch.float32 or tensor(targets).dtype != torch.int64 or tensor(targets).dim() != 1:
        raise NoMatch("the loss is not in fp32, or its targets are no vector of token ids")
    projection, between = _projection(logits)
    x, weight, bias = (argument(projection, place, name) for place, name in enumerate(("input", "weight", "bias")))
    if bias is not None:
        raise NoMatch("the output projection has a bias")
    vocabulary = tensor(weight).shape[0]
    if tensor(weight).dim() != 2 or not same(tensor(logits).shape[-1], vocabulary) or tensor(logits).dim() != 2:
        raise NoMatch("logits are not flattened to [tokens, vocabulary]")
    dtypes = {tensor(node).dtype for node in (x, weight, projection)}  # under autocast, the result has another
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise NoMatch(f"the projection's input, weight and result are {', '.join(sorted(map(str, dtypes)))}")
    nodes = in_order(rewriting.graph, [projection, *between, loss])
    for node in nodes[:-1]:
        if len(node.users) != 1:
            raise NoMatch(
                "logits are also used elsewhere, or returned: compile a function that returns the loss alone, such as "
                "lambda **batch: model(**batch).loss"
            )
    require_no_mutation(projection, loss)
    trains = tensor(loss).requires_grad
    gradients = trains and tensor(x).requires_grad, trains and tensor(weight).requires_grad

    def build() -> list[tuple[fx.Node, fx.Node]]:
        graph = rewriting.graph
        rows = x
        for node in between:
            if operation(node) == "getitem":
                index: Any = node.args[1]
                rows = like(graph.call_function(operator.getitem, (rows, index)), loss, tensor(rows)[index])
        width = tensor(x).shape[-1]
        if tensor(rows).dim() != 2:
            rows = graph.call_method("reshape", (rows, -1, width))
        labels = graph.call_method("contiguous", (targets,))
        arguments = (rows, weight, labels, ignored, smoothing, 0.0, reduction, *gradients)
        result = call(graph, torch.ops.strata.linear_cross_entropy.default, arguments, loss)
        return [(loss, like(graph.call_function(operator.getitem, (result, 0)), loss))]

    rewriting.replace("linear_cross_entropy", nodes, build)


def _projection(logits: Any) -> tuple[fx.Node, list[fx.Node]]:
    """The linear layer that computes the logits, and the nodes between it and the loss."""
    between: list[fx.Node] = []
    node = logits
    while operation(node) != "linear":
        name = operation(node)
        passes = name in (*CASTS, "contiguous", "view", "reshape") or (name == "getitem" and _cuts_tokens(node))
        if not passes or not isinstance(node.args[0], fx.Node):
            raise NoMatch(f"logits pass through '{name}' before the loss")
        if name in ("view", "reshape") and not same(tensor(node).shape[-1], tensor(node.args[0]).shape[-1]):
            raise NoMatch("logits of several tokens are joined before the loss")
        if name in CASTS and tensor(node).dtype != torch.float32:
            raise NoMatch(f"logits are cast to {tensor(node).dtype} before the loss")
        if name == "getitem" and any(operation(later) in ("view", "reshape") for later in _before(node)):
            raise NoMatch("logits are cut after they are flattened")
        between.insert(0, node)
        node = node.args[0]
    return node, between


def _before(node: fx.Node) -> list[Any]:
    found = []
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and operation(source) != "linear" and source.args:
        found.append(source)
        source = source.args[0]
    return found


def _cuts_tokens(node: fx.Node) -> bool:
    """True for an index of tokens that leaves the vocabulary whole, such as [..., :-1, :]."""
    index = node.args[1]
    if not isinstance(index, tuple) or not all(part is Ellipsis or isinstance(part, slice) for part in index):
        return False
    explicit = sum(isinstance(part, slice) for part in index)
    reaches_last = Ellipsis not in index and explicit < tensor(node.args[0]).dim()
    return reaches_last or index[-1] is Ellipsis or index[-1] == slice(None, None, None)
