"""Parts that the screens of `strata top` are made of: tables, bars, sparklines and numbers with units."""

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.bar import Bar
from rich.console import RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
BARS = ((110, 20), (72, 8), (0, 0))  # (columns of the terminal, width of the bars)


def bar_width(columns: int) -> int:
    return next(width for least, width in BARS if columns >= least)


def sparkline(values: Sequence[float], width: int) -> str:
    """Sparkline of at most `width` characters, scaled from minimum to maximum. Each character is the mean of its values; values
    that are not finite are left blank."""
    if not width:
        return ""
    if len(values) > width:
        edges = [len(values) * part // width for part in range(width + 1)]
        values = [_mean(values[start:end]) for start, end in pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_block((value - low) / span if span else 0.0) if math.isfinite(value) else " " for value in values)


def levels(shares: Sequence[float]) -> str:
    """Sparkline of shares from 0 to 1, one character each."""
    return "".join(_block(share) for share in shares)


def duration(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}" if seconds < 10 * unit and name != "min" else f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def milliseconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _block(share: float) -> str:
    return BLOCKS[min(len(BLOCKS) - 1, max(0, int(share * len(BLOCKS))))]


def heading(text: str) -> RenderableType:
    return Rule(Text(text, style="bold"), align="left", style="dim")


def note(text: str) -> RenderableType:
    return Padding(Text(text, style="dim"), (0, 0, 0, 2))


def grid(*justify: str, wrap_last: bool = False) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for number, side in enumerate(justify, start=1):
        wraps = wrap_last and number == len(justify)
        table.add_column(justify="right" if side == "right" else "left", no_wrap=not wraps, overflow="ellipsis")
    return table


def row(table: Table, *cells: RenderableType) -> None:
    """Adds strings as plain text, because rich would read brackets in names as markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def bar(share: float | None, width: int, colour: str | None = None) -> RenderableType:
    if share is None or not width:
        return ""
    colour = colour or ("red" if share >= 0.95 else "yellow" if share >= 0.8 else "green")
    return Bar(1.0, 0.0, min(1.0, share), width=width, color=colour, bgcolor="grey23")


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def gib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f}"
