"""Series and labels that a PromQL query uses, found with a parser."""

from dataclasses import dataclass

import promql_parser


@dataclass(frozen=True)
class Parsed:
    names: set[str]
    matched: set[tuple[str, str]]  # (series, label in a matcher)
    grouped: set[str]  # labels of aggregations
    rated: set[str]  # series inside rate() or increase()


def parsed(expr: str) -> Parsed:
    found = Parsed(set(), set(), set(), set())

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.names.add(str(node.name))
            found.matched.update((str(node.name), matcher.name) for matcher in node.matchers.matchers)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.grouped.update(node.modifier.labels)
        elif isinstance(node, promql_parser.Call) and node.func.name in ("rate", "increase"):
            [inside] = node.args
            found.rated.update(parsed(inside.prettify()).names)

    promql_parser.walk(promql_parser.parse(expr), visit)
    return found


def drawn_labels(expr: str) -> set[str]:
    """Labels that distinguish the series of a result, as far as aggregations limit them; `*` without one."""

    def labels(node: promql_parser.Expr) -> set[str]:
        if isinstance(node, promql_parser.AggregateExpr):
            if str(node.op) in ("topk", "bottomk"):
                return labels(node.expr)
            return set(node.modifier.labels) if node.modifier is not None else set()
        if isinstance(node, promql_parser.BinaryExpr):
            return labels(node.lhs) | labels(node.rhs)
        if isinstance(node, promql_parser.Call):
            return {label for argument in node.args for label in labels(argument)}
        if isinstance(node, promql_parser.NumberLiteral):
            return set()
        if isinstance(node, promql_parser.VectorSelector):
            return {"*"}
        return labels(node.expr)

    return labels(promql_parser.parse(expr))
