"""What a query names, found by a PromQL parser and not by looking for words."""

from dataclasses import dataclass

import promql_parser


@dataclass(frozen=True)
class Asked:
    names: set[str]
    matched: set[tuple[str, str]]  # (name of the series, label it is narrowed by)
    grouped: set[str]  # labels that an aggregation keeps
    rated: set[str]  # names of series that a rate or increase is taken of


def asked(expr: str) -> Asked:
    found = Asked(set(), set(), set(), set())

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.names.add(str(node.name))
            found.matched.update((str(node.name), matcher.name) for matcher in node.matchers.matchers)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.grouped.update(node.modifier.labels)
        elif isinstance(node, promql_parser.Call) and node.func.name in ("rate", "increase"):
            [inside] = node.args
            found.rated.update(asked(inside.prettify()).names)

    promql_parser.walk(promql_parser.parse(expr), visit)
    return found
