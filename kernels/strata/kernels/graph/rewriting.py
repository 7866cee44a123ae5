"""Replacement of matched nodes, with a record of what was and what was not replaced."""

from collections.abc import Callable, Sequence

from torch import fx

from strata.kernels.graph.nodes import erase_unused, in_order, tensor, where
from strata.kernels.graph.record import Fusion, NoMatch, Record, Refusal
from strata.kernels.graph.savings import saved

DEVICES = ("cpu", "cuda", "meta")
Pairs = list[tuple[fx.Node, fx.Node]]


class Rewriting:
    def __init__(self, graph: fx.Graph, record: Record) -> None:
        self.graph = graph
        self.record = record

    def attempt(self, pattern: str, anchor: fx.Node, replace: Callable[["Rewriting", fx.Node], None]) -> None:
        """Replaces the pattern around an anchor, or records why not."""
        place = where(anchor)
        try:
            if (device := tensor(anchor).device.type) not in DEVICES:
                raise NoMatch(f"Strata's operations do not run on {device}")
            replace(self, anchor)
        except NoMatch as reason:
            self.refuse(pattern, place, str(reason))

    def refuse(self, pattern: str, place: str, reason: str) -> None:
        self.record.refused.append(Refusal(pattern, place, reason))

    def replace(
        self,
        pattern: str,
        nodes: Sequence[fx.Node],
        build: Callable[[], Pairs],
        *,
        first: bool = False,
        also: Sequence[fx.Node] = (),
    ) -> None:
        """Replaces nodes by those that `build` inserts: before the last node, or before the first. `build` returns pairs of an
        old and a new node. Nodes of `also` are erased too if nothing else uses them."""
        nodes = in_order(self.graph, nodes)
        place = where(nodes[-1])
        outputs = [node for node in nodes if any(user not in nodes for user in node.users)]
        names = tuple(node.name for node in nodes)
        figures = saved(pattern, nodes, outputs, also)
        with self.graph.inserting_before(nodes[0] if first else nodes[-1]):
            pairs = build()
        self.record.fused.append(Fusion(pattern, place, names, *figures))
        for before, after in pairs:
            before.replace_all_uses_with(after)
        erase_unused(in_order(self.graph, [*also, *nodes]))
