"""Memory traffic and kernel launches that a fusion saves in the forward pass, computed from shapes.

Before: every node of the pattern that is no view launches one kernel, which reads its tensor arguments and writes its result.
After: one launch, which reads what the pattern reads from outside and writes what is used outside. The loss also writes and reads
its logits once, chunk by chunk. This is the difference to eager execution. Inductor merges a part of these nodes itself.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, fx

from strata.kernels.graph.nodes import CASTS, operation

VIEWS = {"view", "transpose", "getitem", "expand", "unsqueeze", "contiguous", "squeeze", "permute"}


def saved(
    pattern: str, nodes: Sequence[fx.Node], outputs: Iterable[fx.Node], dropped: Collection[fx.Node] = ()
) -> tuple[int | None, int]:
    """(bytes, launches). Bytes are None if a size is symbolic. `dropped` are inputs that the replacement does not read."""
    kernels = [node for node in nodes if not is_view(node)]
    before = [size for node in kernels for size in (*map(_bytes, _read(node)), _bytes(node))]
    outside = {source for node in nodes for source in _read(node) if source not in nodes and source not in dropped}
    after = [*map(_bytes, outside), *map(_bytes, outputs)]
    if pattern == "linear_cross_entropy":
        after += 2 * [_bytes(next(node for node in nodes if operation(node) == "linear"))]
    known = [size for size in (*before, *after) if size is not None]
    exact = len(known) == len(before) + len(after)
    total = sum(known[: len(before)]) - sum(known[len(before) :]) if exact else None
    return total, len(kernels) - 1


def _read(node: fx.Node) -> set[fx.Node]:
    """Tensors that a node reads. Of an expanded tensor, memory holds the values before the expansion."""
    sources = (node.args[0] if operation(node) == "expand" else node for node in node.all_input_nodes)
    return {node for node in sources if isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), Tensor)}


def is_view(node: fx.Node) -> bool:
    name = operation(node)
    if name == "reshape":
        return operation(node.args[0]) != "expand"
    if name in CASTS and isinstance(node.args[0], fx.Node):
        return _value(node).dtype == _value(node.args[0]).dtype
    return name in VIEWS


def _value(node: fx.Node) -> Tensor:
    value: Any = node.meta["example_value"]
    assert isinstance(value, Tensor)
    return value


def _bytes(node: fx.Node) -> int | None:
    count = _value(node).numel()
    return count * _value(node).element_size() if isinstance(count, int) else None
