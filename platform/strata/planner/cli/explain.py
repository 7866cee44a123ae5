"""Text form of a worksheet: the value of every line, its formula, the formula with values substituted, and the reason.

Substituted values are in base units (bytes, seconds, FLOP), so a formula can be evaluated as printed.
"""

import re
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from strata.planner.units import show
from strata.planner.worksheet import FUNCTIONS, Line, Worksheet

DIGITS = 5
NAME = re.compile(r"\b[A-Za-z_]\w*")


def substituted(worksheet: Worksheet, outer: Worksheet | None = None) -> Iterator[tuple[Line, str | None]]:
    """Lines with the names in their formulas replaced by values. A value is the one at the time of evaluation, since a later line
    may reuse a name."""
    written: dict[str, float] = {}
    own = {line.name for line in worksheet.lines}

    def value(match: re.Match[str]) -> str:
        name = match[0]
        if name in FUNCTIONS:
            return name
        if name in written:
            return plain(written[name])
        return plain(outer[name] if outer and name in own else worksheet[name])

    for line in worksheet.lines:
        yield line, None if line.formula is None else NAME.sub(value, line.formula)
        written[line.name] = line.value


def plain(value: float) -> str:
    """Short Python literal."""
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.7g}"


def as_text(worksheet: Worksheet) -> Text:
    text = Text()
    for depth, part, outer in _walk(worksheet):
        if not part.lines and not part.parts:
            continue
        text.append(f"{'  ' * depth}{part.title}\n", "bold underline")
        for line, filled in substituted(part, outer):
            _write(text, line, filled, "  " * (depth + 1))
    return text


def as_json(worksheet: Worksheet) -> dict[str, Any]:
    return {
        "title": worksheet.title,
        "lines": [
            {"name": line.name, "value": line.value, "unit": line.unit, "formula": line.formula, "why": line.why}
            for line in worksheet.lines
        ],
        "parts": [as_json(part) for part in worksheet.parts],
    }


def _walk(
    worksheet: Worksheet, depth: int = 0, outer: Worksheet | None = None
) -> Iterator[tuple[int, Worksheet, Worksheet | None]]:
    yield depth, worksheet, outer
    for part in worksheet.parts:
        yield from _walk(part, depth + 1, worksheet)


def _write(text: Text, line: Line, filled: str | None, indent: str) -> None:
    text.append(f"{indent}{line.name}", "bold")
    text.append(f" = {show(line.value, line.unit, DIGITS)}")
    if line.why:
        text.append(f"   {line.why}", "dim")
    text.append("\n")
    if line.formula is not None:
        text.append(f"{indent}    = {line.formula}\n", "cyan")
        if filled != line.formula:
            text.append(f"{indent}    = {filled}\n", "cyan")
