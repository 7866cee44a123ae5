"""Proof that an attention mask is causal, with or without a sliding window, for every size.

transformers builds the mask inside the graph from `arange`s. Integers of such a graph are linear in their indices, and its
booleans are conjunctions of inequalities between them. Nodes are evaluated to these forms; a node that has none, such as an
input, ends the proof.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from strata.kernels.graph.nodes import argument, operation, tensor, written
from strata.kernels.graph.record import NoMatch


@dataclass(frozen=True)
class Line:
    """Integers: offset + the sum of slope x index over all dimensions. A dimension of size 1 has slope 0."""

    slopes: tuple[int, ...]
    offset: int

    def constant(self) -> bool:
        return not any(self.slopes)


@dataclass(frozen=True)
class Conditions:
    """Booleans: true where every line is at least 0."""

    rank: int
    lines: frozenset[Line]

    def constant(self) -> bool | None:
        if all(line.constant() for line in self.lines):
            return all(line.offset >= 0 for line in self.lines)
        return None


Form = Line | Conditions


def causal_window(mask: fx.Node) -> tuple[int | None, list[fx.Node]]:
    """Window of a causal mask [batch, heads, queries, keys], None for none, and the nodes that compute the mask."""
    seen: dict[fx.Node, Form] = {}
    form = _form(mask, seen)
    if not isinstance(form, Conditions) or form.rank != 4:
        raise NoMatch("the mask is no boolean tensor [batch, heads, queries, keys]")
    causal = Line((0, 0, 1, -1), 0)
    others = form.lines - {causal}
    if causal not in form.lines or len(others) > 1:
        raise NoMatch("the mask is not causal")
    for line in others:
        if line.slopes != (0, 0, -1, 1) or line.offset < 0:
            raise NoMatch("the mask is neither causal nor a causal window")
        return line.offset + 1, list(seen)
    return None, list(seen)


def _form(value: Any, seen: dict[fx.Node, Form]) -> Form:
    if isinstance(value, bool):
        return _constant(value, 0)
    if isinstance(value, int):
        return Line((), value)
    if not isinstance(value, fx.Node):
        raise NoMatch(f"the mask depends on {value}")
    if value not in seen:
        counted_on = len(value.users) == 1 and operation(next(iter(value.users))) == "iadd"  # `positions += offset`
        if written(value) and not counted_on:
            raise NoMatch(f"'{value.name}' of the mask is changed in place")
        if value.op == "placeholder":
            raise NoMatch(f"the mask depends on the input '{value.name}'")
        form = _evaluated(value, seen)
        if form is None:
            raise NoMatch(f"'{value.name}' ({operation(value)}) of the mask is no comparison of positions")
        seen[value] = _flat(form, tuple(tensor(value).shape))
    return seen[value]


def _evaluated(node: fx.Node, seen: dict[fx.Node, Form]) -> Form | None:
    name = operation(node)
    if name == "arange":
        counts = len(node.args) == 1 or (len(node.args) == 2 and node.args[0] == 0)
        whole = counts and not tensor(node).dtype.is_floating_point and set(node.kwargs) <= {"device", "dtype"}
        return Line((1,), 0) if whole else None
    if name in ("new_ones", "ones"):
        return _constant(True, tensor(node).dim()) if tensor(node).dtype == torch.bool else None
    if name in ("add", "iadd", "sub", "eq", "ne", "le", "lt", "ge", "gt") and len(node.args) == 2:
        return _compared(name, *_aligned(_form(node.args[0], seen), _form(node.args[1], seen)))
    if name in ("and_", "__and__", "bitwise_and", "logical_and"):
        one, other = _aligned(_form(node.args[0], seen), _form(node.args[1], seen))
        if isinstance(one, Conditions) and isinstance(other, Conditions):
            return Conditions(one.rank, one.lines | other.lines)
        return None
    source = node.args[0] if node.args else None
    if name not in ("to", "contiguous", "expand", "unsqueeze", "getitem", "diff", "cumsum") or not isinstance(source, fx.Node):
        return None
    form, rank = _form(source, seen), tensor(source).dim()
    if name in ("to", "contiguous"):
        return form if tensor(node).dtype == tensor(source).dtype else None
    if name == "expand":
        return _moved(form, (None,) * (tensor(node).dim() - rank) + tuple(range(rank)))
    if name == "unsqueeze":
        at = argument(node, 1, "dim") % (rank + 1)
        return _moved(form, (*range(at), None, *range(at, rank)))
    if name == "getitem":
        return _indexed(form, node, rank, seen)
    if name == "diff":
        return _steps(form, node, rank, seen)
    nothing = form.constant() is False if isinstance(form, Conditions) else form == Line((0,) * rank, 0)
    return Line((0,) * rank, 0) if nothing else None  # cumsum


def _constant(value: bool, rank: int) -> Conditions:
    return Conditions(rank, frozenset() if value else frozenset({Line((0,) * rank, -1)}))


def _flat(form: Form, shape: tuple[Any, ...]) -> Form:
    """The form without slopes along dimensions of size 1, where the only index is 0."""
    if isinstance(form, Conditions):
        return Conditions(form.rank, frozenset(_flat_line(line, shape) for line in form.lines))
    return _flat_line(form, shape)


def _flat_line(line: Line, shape: tuple[Any, ...]) -> Line:
    one = (isinstance(size, int) and size == 1 for size in shape)
    return Line(tuple(0 if single else slope for slope, single in zip(line.slopes, one, strict=True)), line.offset)


def _moved(form: Form, order: tuple[int | None, ...]) -> Form:
    """The form with dimensions in another order; None is a new one."""
    if isinstance(form, Conditions):
        return Conditions(len(order), frozenset(_moved_line(line, order) for line in form.lines))
    return _moved_line(form, order)


def _moved_line(line: Line, order: tuple[int | None, ...]) -> Line:
    return Line(tuple(0 if dim is None else line.slopes[dim] for dim in order), line.offset)


def _rank(form: Form) -> int:
    return form.rank if isinstance(form, Conditions) else len(form.slopes)


def _aligned(one: Form, other: Form) -> tuple[Form, Form]:
    rank = max(_rank(one), _rank(other))
    wide = [_moved(form, (None,) * (rank - _rank(form)) + tuple(range(_rank(form)))) for form in (one, other)]
    return wide[0], wide[1]


def _compared(name: str, one: Form, other: Form) -> Form | None:
    if not isinstance(one, Line) or not isinstance(other, Line):
        return None
    if name in ("add", "iadd"):
        return Line(tuple(a + b for a, b in zip(one.slopes, other.slopes, strict=True)), one.offset + other.offset)
    more = Line(tuple(a - b for a, b in zip(one.slopes, other.slopes, strict=True)), one.offset - other.offset)
    less = Line(tuple(-slope for slope in more.slopes), -more.offset)
    if name == "sub":
        return more
    if name in ("eq", "ne"):
        return _constant((more.offset == 0) == (name == "eq"), len(more.slopes)) if more.constant() else None
    line = more if name in ("ge", "gt") else less
    strict = 1 if name in ("gt", "lt") else 0
    return Conditions(len(line.slopes), frozenset({Line(line.slopes, line.offset - strict)}))


def _indexed(form: Form, node: fx.Node, rank: int, seen: dict[fx.Node, Form]) -> Form | None:
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if any(isinstance(part, fx.Node) for part in index):  # a gather from equal values
        for part in index:
            _form(part, seen) if isinstance(part, fx.Node) else None
        equal = form.constant()
        wide = tensor(node).dim()
        if isinstance(form, Line):
            return Line((0,) * wide, form.offset) if equal else None
        return None if equal is None else _constant(equal, wide)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        full = (slice(None),) * (rank - sum(part is not None and part is not Ellipsis for part in index))
        index = (*index[:at], *full, *index[at + 1 :])
    order: list[int | None] = []
    dim = 0
    for part in index:
        if part is None:
            order.append(None)
        elif isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1):
            order.append(dim)
            dim += 1
        else:
            return None
    return _moved(form, (*order, *range(dim, rank)))


def _steps(form: Form, node: fx.Node, rank: int, seen: dict[fx.Node, Form]) -> Form | None:
    """Differences along the last dimension, after a value prepended to it that is one step before the first."""
    dim, prepended = argument(node, 2, "dim", -1), argument(node, 3, "prepend")
    if not isinstance(form, Line) or dim not in (-1, rank - 1) or argument(node, 1, "n", 1) != 1 or prepended is None:
        return None
    if tensor(prepended).shape[-1] != 1 or argument(node, 4, "append") is not None:
        return None
    step = form.slopes[-1]
    before = Line((*form.slopes[:-1], 0), form.offset - step)
    return Line((0,) * rank, step) if _form(prepended, seen) == before else None
