"""Rotary embedding of queries and keys, as in Hugging Face's `apply_rotary_pos_emb`: both in one launch.

The pattern is `x * cos + cat(-x[half:], x[:half]) * sin`. Its tables hold the angles of one half twice; the operation takes them
once, so the repetition is checked.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from strata.kernels.graph.nodes import (
    CASTS,
    DTYPES,
    argument,
    call,
    calls,
    heads_last,
    in_order,
    is_last,
    like,
    only_user,
    operation,
    other_operand,
    require_no_mutation,
    same,
    tensor,
    where,
)
from strata.kernels.graph.record import NoMatch
from strata.kernels.graph.rewriting import Rewriting


@dataclass(frozen=True)
class Rotation:
    x: fx.Node
    cos: fx.Node  # with a dimension of size 1 for the heads
    sin: fx.Node
    nodes: tuple[fx.Node, ...]
    result: fx.Node


def fuse(rewriting: Rewriting) -> None:
    pairs: dict[tuple[fx.Node, fx.Node], list[Rotation]] = {}
    for cat in calls(rewriting.graph, "cat"):
        if _is_rotated_half(cat):
            try:
                found = _rotation(cat)
                pairs.setdefault((found.cos, found.sin), []).append(found)
            except NoMatch as reason:
                rewriting.refuse("rope", where(cat), str(reason))
    for rotations in pairs.values():
        rewriting.attempt("rope", rotations[0].result, lambda made, _, both=rotations: _replace(made, both))  # type: ignore[misc]


def _is_rotated_half(cat: fx.Node) -> bool:
    parts = argument(cat, 0, "tensors")
    return isinstance(parts, (tuple, list)) and len(parts) == 2 and operation(parts[0]) == "neg"


def _rotation(cat: fx.Node) -> Rotation:
    negative, first = argument(cat, 0, "tensors")
    second = negative.args[0]
    if operation(first) != "getitem" or operation(second) != "getitem" or first.args[0] is not second.args[0]:
        raise NoMatch("the two halves are not of one tensor")
    x = first.args[0]
    width = tensor(x).shape[-1]
    half = width // 2
    if not is_last(argument(cat, 1, "dim", 0), tensor(x).dim()) or width % 2:
        raise NoMatch("the halves are not joined along the last dimension")
    if first.args[1] != (Ellipsis, slice(None, half, None)) or second.args[1] != (Ellipsis, slice(half, None, None)):
        raise NoMatch("the tensor is not rotated by halves of its whole last dimension")
    turned = only_user(cat)
    result = only_user(turned)
    if operation(turned) != "mul" or operation(result) != "add":
        raise NoMatch(f"'{operation(turned)}' and '{operation(result)}' follow the rotated halves, not a product and a sum")
    straight = other_operand(result, turned)
    if operation(straight) != "mul" or x not in straight.args:
        raise NoMatch("the sum's other term is no product of the same tensor")
    only_user(straight)
    for node in (first, second, negative):
        only_user(node)
    return Rotation(
        x,
        other_operand(straight, x),
        other_operand(turned, cat),
        (straight, first, second, negative, cat, turned, result),
        result,
    )


def _table(node: Any, x: fx.Node, function: str) -> fx.Node:
    """[batch or 1, tokens, width] of a table with a dimension for the heads, if both halves of it are equal."""
    if operation(node) != "unsqueeze" or argument(node, 1, "dim") not in (1, -3) or tensor(node).dim() != 4:
        raise NoMatch(f"the table of the {function} has no dimension of size 1 for the heads")
    table: fx.Node = node.args[0]
    if tensor(table).dtype != tensor(x).dtype or tensor(table).requires_grad:
        raise NoMatch(f"the table of the {function} is {tensor(table).dtype} or has a gradient, the heads are {tensor(x).dtype}")
    source: Any = table
    while operation(source) in (*CASTS, "contiguous") or (operation(source) == "mul" and _is_scaled(source)):
        source = source.args[0]
    if operation(source) != function:
        raise NoMatch(f"the table of the {function} is computed outside of the graph or in another way ('{source}')")
    angles = source.args[0]
    parts: Any = argument(angles, 0, "tensors") if operation(angles) == "cat" else ()
    if len(parts) != 2 or parts[0] is not parts[1] or not is_last(argument(angles, 1, "dim", 0), 3):
        raise NoMatch(f"the halves of the {function} may differ")
    if not same(tensor(table).shape[-1], tensor(x).shape[-1]):
        raise NoMatch("a part of the head is not rotated")
    return table


def _is_scaled(node: fx.Node) -> bool:
    return len(node.args) == 2 and isinstance(node.args[1], (int, float))


def _replace(rewriting: Rewriting, rotations: list[Rotation]) -> None:
    if len(rotations) != 2:
        raise NoMatch(f"{len(rotations)} tensors are rotated by the same tables, not queries and keys")
    q, k = rotations
    shape, other = tensor(q.x).shape, tensor(k.x).shape
    if len(shape) != 4 or len(other) != 4 or not all(same(shape[dim], other[dim]) for dim in (0, 2, 3)):
        raise NoMatch(f"queries {list(shape)} and keys {list(other)} differ in more than the number of heads")
    dtypes = {tensor(node).dtype for one in rotations for node in (one.x, one.result)}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise NoMatch(f"queries, keys and their rotations are {', '.join(sorted(map(str, dtypes)))}")
    cos, sin = _table(q.cos, q.x, "cos"), _table(q.sin, q.x, "sin")
    nodes = [*q.nodes, *k.nodes]
    order = in_order(rewriting.graph, [*nodes, *q.result.users, *k.result.users])
    last = max(order.index(node) for node in nodes)
    if any(order.index(user) < last for one in rotations for user in one.result.users):
        raise NoMatch("the first result is used before the second is computed")
    require_no_mutation(order[0], order[last])

    def build() -> list[tuple[fx.Node, fx.Node]]:
        graph = rewriting.graph
        tables = [_half(table, q.result) for table in (cos, sin)]
        heads = [heads_last(one.x, one.result) for one in rotations]
        turned = call(graph, torch.ops.strata.rope.default, (*heads, *tables, False, False), q.result)
        pairs = []
        for index, one in enumerate(rotations):
            value = tensor(one.x).transpose(1, 2)
            result = like(graph.call_function(operator.getitem, (turned, index)), one.result, value)
            pairs.append((one.result, like(graph.call_method("transpose", (result, 1, 2)), one.result)))
        return pairs

    rewriting.replace("rope", nodes, build)


def _half(table: fx.Node, old: fx.Node) -> fx.Node:
    """[tokens, half] or [batch, tokens, half]."""
    value = tensor(table)
    index: tuple[Any, ...] = (Ellipsis, slice(None, value.shape[-1] // 2))
    if same(value.shape[0], 1):
        index = (0, *index)
    return like(table.graph.call_function(operator.getitem, (table, index)), old, value[index])
