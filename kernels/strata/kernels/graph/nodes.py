"""Questions about the nodes of a Dynamo graph that several patterns ask."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from strata.kernels.graph.record import NoMatch

MODULES = ("_operator", "torch", "torch.nn.functional", "torch._C._nn")
CASTS = ("to", "float", "half", "bfloat16", "type")
MAY_ALIAS = (*CASTS, "view", "reshape", "transpose", "permute", "getitem", "expand", "unsqueeze", "squeeze", "contiguous")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of every operation, on every device
IN_PLACE = {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "imod", "iand", "ior", "ixor", "imatmul"}
NOT_IN_PLACE = {"and_", "or_", "not_", "is_"}  # functions of `operator` whose plain names are keywords


def operation(node: Any) -> str:
    """Name of the function or method that a node calls: `add` for `a + b`, `torch.add(a, b)` and `a.add(b)`."""
    if not isinstance(node, fx.Node):
        return "constant"
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        module, name = getattr(node.target, "__module__", None), getattr(node.target, "__name__", str(node.target))
        return name if module in MODULES else f"{module}.{name}"
    return node.op


def mutates(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = operation(node).rpartition(".")[2]
    by_name = name.endswith("_") and not name.endswith("__") and name not in NOT_IN_PLACE
    return name in IN_PLACE or by_name or "out" in node.kwargs


def written(node: fx.Node) -> bool:
    """True if a node's memory may be written to, directly or through a view."""
    return any(mutates(user) or (operation(user) in MAY_ALIAS and written(user)) for user in node.users)


def tensor(node: Any) -> Tensor:
    """The fake tensor that a node computes."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor):
        raise NoMatch(f"'{node}' is no tensor")
    return value


def same(one: Any, other: Any) -> bool:
    """Equality of sizes that holds for every input, without a guard."""
    return statically_known_true(one == other)


def same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def is_last(dim: Any, rank: int) -> bool:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return isinstance(dim, int) and dim in (-1, rank - 1)


def only_user(node: fx.Node) -> fx.Node:
    if len(node.users) != 1:
        names = ", ".join(operation(user) for user in node.users)
        raise NoMatch(f"'{node.name}' is used {len(node.users)} times ({names})")
    return next(iter(node.users))


def operands(node: fx.Node) -> tuple[Any, Any]:
    if len(node.args) != 2 or node.kwargs:
        raise NoMatch(f"'{node.name}' has other arguments than two operands")
    return node.args[0], node.args[1]


def other_operand(node: fx.Node, one: fx.Node) -> Any:
    left, right = operands(node)
    return right if left is one else left


def without_cast(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The tensor before a change of dtype, and the node that changes it."""
    if operation(node) in CASTS and isinstance(node.args[0], fx.Node) and tensor(node.args[0]).device == tensor(node).device:
        return node.args[0], [node]
    return node, []


def where(node: fx.Node) -> str:
    """Path of the module whose code the node comes from, for example `model.layers.0.mlp`; empty outside of modules."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    if not paths:
        return ""
    path = str(paths[-1]).replace("L['self'].", "").replace("L['self']", "")
    parts = path.replace("_modules['", "").replace("']", "").replace("['", ".").replace("[", ".").replace("]", "").split(".")
    parts = [part for part in parts if part and part not in ("_modules", "modules")]
    roots = [place for place, part in enumerate(parts) if part in ("model", "lm_head")]
    return ".".join(parts[roots[-1] :] if roots else parts)  # a model inside a function or a wrapper has a longer path


def require_no_mutation(first: fx.Node, last: fx.Node) -> None:
    """The replacement reads its inputs later than the first node of the pattern did. A write in between would be seen."""
    node = first.next
    while node is not last and node.op != "root":
        if mutates(node):
            raise NoMatch(f"'{node.name}' writes in place between the nodes of the pattern")
        node = node.next


def in_order(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    wanted = set(nodes)
    return [node for node in graph.nodes if node in wanted]


def erase_unused(nodes: Sequence[fx.Node]) -> None:
    """Erases those of the nodes, given in graph order, that nothing uses any more."""
    for node in reversed(nodes):
        if not node.users and not node._erased:
            node.graph.erase_node(node)


def calls(graph: fx.Graph, *names: str) -> Iterator[fx.Node]:
    for node in list(graph.nodes):
        if not node._erased and node.op in ("call_function", "call_method") and operation(node) in names:
            yield node


def like(new: fx.Node, old: fx.Node, value: Any = None) -> fx.Node:
    """`new` with the metadata of the node that it replaces."""
    new.meta.update(old.meta)
    if value is not None:
        new.meta["example_value"] = value
    return new


def call(graph: fx.Graph, operator: Any, arguments: tuple[Any, ...], old: fx.Node) -> fx.Node:
    """A call of an operation with several results, with the place in the model of the node that it replaces."""
    node = graph.call_function(operator, arguments)
    node.meta.update({key: value for key, value in old.meta.items() if key != "example_value"})
    return node


def heads_last(x: fx.Node, old: fx.Node) -> fx.Node:
    """[b, h, t, e] as [b, t, h, e]; the tensor itself if x is its transposition."""
    if operation(x) == "transpose" and tuple(x.args[1:]) == (1, 2) and isinstance(x.args[0], fx.Node):
        return x.args[0]
    return like(x.graph.call_method("transpose", (x, 1, 2)), old, tensor(x).transpose(1, 2))
