"""Tables of a profile for the terminal: time by class of work, matrix products by shape, and idle time of the device."""

from collections import defaultdict
from collections.abc import Sequence

from rich.table import Table

from strata.training.profile import intervals
from strata.training.profile.trace import Trace
from strata.training.profile.work import Work

ROWS = 24


def kinds(trace: Trace, found: Sequence[Work], peak: float | None) -> Table:
    """Seconds per step of each class of work, its share of the step, and the rate of its products."""
    steps = trace.steps()
    count, period = len(steps), (steps[-1].end - steps[0].begin) / len(steps)
    table = _table(f"rank {trace.rank}: a step of {period * 1e3:,.1f} ms", "class", "ms", "share", "calls", "TFLOP/s", "of peak")
    groups: dict[str, list[Work]] = defaultdict(list)
    for work in found:
        groups[f"{work.kind}, {work.phase}"].append(work)
    for name, members in sorted(groups.items(), key=lambda each: -_seconds(each[1])):
        _row(table, name, members, count, period, peak)
    busy = intervals.union((work.begin, work.end) for work in found)
    idle = period - intervals.total(busy) / count
    table.add_row("idle", f"{idle * 1e3:,.2f}", f"{idle / period:.1%}", "", "", "")
    return table


def products(trace: Trace, found: Sequence[Work], peak: float | None) -> Table:
    """Products and attention by shape."""
    steps = trace.steps()
    count, period = len(steps), (steps[-1].end - steps[0].begin) / len(steps)
    table = _table("products and attention by shape", "shape", "ms", "share", "calls", "TFLOP/s", "of peak")
    groups: dict[str, list[Work]] = defaultdict(list)
    for work in found:
        if work.shape:
            groups[f"{work.kind} {work.phase} {work.shape} {work.dtype}"].append(work)
    for name, members in sorted(groups.items(), key=lambda each: -_seconds(each[1]))[:ROWS]:
        _row(table, name, members, count, period, peak)
    return table


def slowest(trace: Trace, found: Sequence[Work]) -> Table:
    """Kernels or operators with the most time, by name."""
    steps = trace.steps()
    count, period = len(steps), (steps[-1].end - steps[0].begin) / len(steps)
    table = _table("kernels with the most time", "kernel", "ms", "share", "calls", "", "")
    groups: dict[str, list[Work]] = defaultdict(list)
    for work in found:
        groups[f"{work.kind} {work.phase}: {work.name[:70]}"].append(work)
    for name, members in sorted(groups.items(), key=lambda each: -_seconds(each[1]))[:ROWS]:
        _row(table, name, members, count, period, None)
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _row(table: Table, name: str, members: Sequence[Work], steps: int, period: float, peak: float | None) -> None:
    seconds, flops = _seconds(members) / steps, sum(work.flops for work in members) / steps
    rate = flops / seconds if seconds else 0.0
    table.add_row(
        name,
        f"{seconds * 1e3:,.2f}",
        f"{seconds / period:.1%}",
        f"{len(members) / steps:,.0f}",
        f"{rate / 1e12:,.3g}" if rate else "",
        f"{rate / peak:.0%}" if rate and peak else "",
    )


def _seconds(members: Sequence[Work]) -> float:
    return sum(work.seconds for work in members)
