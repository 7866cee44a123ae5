"""Picture of a graph before and after fusion, as SVG: one block and the loss, inputs above the nodes that read them.

Views, parameters and the construction of masks and rotary tables are left out. Nodes of one pattern have one colour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import Tensor, fx

from strata.kernels.graph.nodes import operation, where
from strata.kernels.graph.savings import is_view

COLOURS = {
    "rms_norm": "#f6c177",
    "add_rms_norm": "#f2a65a",
    "rope": "#9ccfd8",
    "swiglu": "#a3be8c",
    "flash_attention": "#b4a7e5",
    "linear_cross_entropy": "#eb9a9a",
}
PLAIN = "#e8e8ec"
WIDTH, HEIGHT, ACROSS, DOWN, MARGIN = 150, 22, 166, 34, 24


@dataclass(frozen=True)
class Box:
    name: str
    label: str
    where: str
    inputs: tuple[str, ...]


def boxes(graph: fx.Graph) -> list[Box]:
    """The nodes that compute a tensor, with the inputs among them."""
    visible: dict[fx.Node, tuple[str, ...]] = {}
    found = []
    for node in graph.nodes:
        sources = tuple(dict.fromkeys(name for source in node.all_input_nodes for name in visible.get(source, ())))
        if node.op in ("placeholder", "output") or not _computes(node):
            visible[node] = sources
            continue
        visible[node] = (node.name,)
        found.append(Box(node.name, _label(node), where(node), sources))
    return found


def _computes(node: fx.Node) -> bool:
    value: Any = node.meta.get("example_value")
    if _is_ours(node):
        return True
    if not isinstance(value, Tensor) or operation(node) == "getitem":
        return False
    return not is_view(node)


def _is_ours(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("strata.")


def _label(node: fx.Node) -> str:
    return "strata." + str(node.target).split(".")[1] if _is_ours(node) else operation(node).rpartition(".")[2]


def of_one_block(found: Sequence[Box], block: str) -> list[Box]:
    """Boxes of a decoder layer, and of what follows the last one: the final norm, the output projection and the loss."""
    layers = [place for place, box in enumerate(found) if ".layers." in f".{box.where}"]
    after = max(layers, default=-1)
    return [
        box
        for place, box in enumerate(found)
        if box.where == block or box.where.startswith(f"{block}.") or (place > after and layers)
    ] or list(found)


def svg(before: Sequence[Box], after: Sequence[Box], patterns: Mapping[str, str], title: str) -> str:
    """Both graphs side by side. `patterns` maps the names of fused nodes to their pattern."""
    left, left_width, left_height = _drawn(before, patterns, MARGIN)
    right, right_width, right_height = _drawn(after, patterns, left_width + 3 * MARGIN)
    width, height = left_width + right_width + 5 * MARGIN, max(left_height, right_height) + 4 * MARGIN
    used = [name for name in COLOURS if name in patterns.values()]
    legend = "".join(
        f'<rect x="{MARGIN + index * 150}" y="{height - 30}" width="14" height="14" fill="{COLOURS[name]}"/>'
        f'<text x="{MARGIN + index * 150 + 20}" y="{height - 19}">{name}</text>'
        for index, name in enumerate(used)
    )
    width = max(width, 2 * MARGIN + 150 * len(used))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/><text x="{MARGIN}" y="18" font-size="14">{escape(title)}</text>'
        f'<text x="{MARGIN}" y="40">before: {len(before)} operations</text>'
        f'<text x="{left_width + 3 * MARGIN}" y="40">after: {len(after)} operations</text>'
        f"{left}{right}{legend}</svg>\n"
    )


def _drawn(found: Sequence[Box], patterns: Mapping[str, str], left: int) -> tuple[str, int, int]:
    """SVG elements, width and height. A box is one row below the lowest of its inputs."""
    names = {box.name for box in found}
    rows: dict[str, int] = {}
    for box in found:
        rows[box.name] = 1 + max((rows[name] for name in box.inputs if name in names), default=-1)
    in_row: dict[int, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for box in found:
        column = in_row.get(rows[box.name], 0)
        in_row[rows[box.name]] = column + 1
        places[box.name] = (left + column * ACROSS, 54 + rows[box.name] * DOWN)
    lines, shapes = [], []
    for box in found:
        x, y = places[box.name]
        for name in box.inputs:
            if name in places:
                from_x, from_y = places[name]
                lines.append(
                    f'<path d="M{from_x + WIDTH // 2} {from_y + HEIGHT} L{x + WIDTH // 2} {y}" stroke="#9a9aa5" fill="none"/>'
                )
        pattern = patterns.get(box.name) or box.label.removeprefix("strata.")
        shapes.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{COLOURS.get(pattern, PLAIN)}"/>'
            f'<text x="{x + WIDTH // 2}" y="{y + 15}" text-anchor="middle">{escape(box.label)}</text>'
        )
    return "".join(lines + shapes), max(in_row.values(), default=1) * ACROSS, (max(in_row, default=0) + 1) * DOWN
