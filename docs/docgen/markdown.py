"""Markdown tables, and numbers as the results pages print them."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: int | None = None) -> str:
    """Columns from `numeric` on are aligned right."""
    numeric = len(columns) if numeric is None else numeric
    rule = ["---:" if number >= numeric else "---" for number in range(len(columns))]
    return "\n".join(_line(cells) for cells in (columns, rule, *rows))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def bold(text: str, wanted: bool = True) -> str:
    return f"**{text}**" if wanted else text


def number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:,.1f} ms" if seconds < 0.1 else f"{1000 * seconds:,.0f} ms"


def duration(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{1000 * ms:,.0f} µs" if ms < 1 else f"{ms:.3g} ms"


def signed(share: float, digits: int = 0) -> str:
    return f"{share:+.{digits}%}".replace("-", "\u2212")


def size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"
