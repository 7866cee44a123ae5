"""A worksheet: every figure of a plan is a line with a name, a formula over other lines, and a reason.

The formula itself is evaluated, so `--explain` cannot differ from the plan.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

from strata.planner.step.tiles import filled

FUNCTIONS: dict[str, Any] = {
    "max": max,
    "min": min,
    "ceil": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
    "log2": math.log2,
    "exp": math.exp,
    "log": math.log,
    "filled": filled,
    "__builtins__": {},
}


@dataclass(frozen=True)
class Line:
    """`formula` None: given, not worked out."""

    name: str
    value: float
    unit: str
    formula: str | None
    why: str


class Worksheet:
    """Lines in the order in which they were written. A part sees the lines of the worksheet it is a part of."""

    def __init__(self, title: str, outer: "Worksheet | None" = None) -> None:
        self.title = title
        self.lines: list[Line] = []
        self.parts: list[Worksheet] = []
        self._values: dict[str, float] = dict(outer._values) if outer else {}

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def given(self, name: str, value: float, unit: str = "", why: str = "") -> float:
        return self._write(Line(name, value, unit, None, why))

    def work_out(self, name: str, formula: str, unit: str = "", why: str = "") -> float:
        """`formula` is Python's arithmetic over the names of earlier lines, with the functions above."""
        return self._write(Line(name, float(evaluate(formula, self._values)), unit, formula, why))

    def part(self, title: str) -> "Worksheet":
        inner = Worksheet(title, self)
        self.parts.append(inner)
        return inner

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "Worksheet"]]:
        yield depth, self
        for part in self.parts:
            yield from part.walk(depth + 1)

    def _write(self, line: Line) -> float:
        self.lines.append(line)
        self._values[line.name] = line.value
        return line.value


def evaluate(formula: str, values: dict[str, float]) -> float:
    value: float = eval(_compiled(formula), FUNCTIONS, values)
    return value


@cache
def _compiled(formula: str) -> CodeType:
    return compile(formula, formula, "eval")
