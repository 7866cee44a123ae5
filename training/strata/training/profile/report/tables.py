"""Tables of a profile for the terminal: time by class of work, products by shape, kernels by name, and the plan."""

from collections import defaultdict
from collections.abc import Callable, Mapping

from rich.table import Table

from strata.platform.profile.work import Work
from strata.training.profile.analysis.account import WORKING
from strata.training.profile.analysis.summary import RankSummary

ROWS = 20


def kinds(rank: RankSummary, peak: float | None) -> Table:
    """Seconds of a typical step: work by class with the rate of its products, then all other causes."""
    title = f"rank {rank.rank}: {_ms(rank.own)} of own time in a step of {_ms(rank.wall)}"
    table = _table(title, "class", "ms", "share", "calls", "TFLOP/s", "of peak")
    _rows(table, rank, lambda work: f"{work.kind}, {work.phase}", peak, None)
    for cause, seconds in rank.seconds.items():
        if cause not in WORKING and seconds > 0:
            table.add_row(f"no work: {cause}", f"{seconds * 1e3:,.2f}", f"{seconds / rank.own:.1%}", "", "", "")
    if rank.waiting:
        table.add_row("no work: waiting for other ranks", f"{rank.waiting * 1e3:,.2f}", "", "", "", "")
    return table


def products(rank: RankSummary, peak: float | None) -> Table:
    table = _table("products and attention by shape", "shape", "ms", "share", "calls", "TFLOP/s", "of peak")
    _rows(table, rank, lambda work: work.shape and f"{work.kind}, {work.phase}, {work.shape} {work.dtype}", peak, ROWS)
    return table


def slowest(rank: RankSummary) -> Table:
    table = _table("kernels with the most time", "kernel", "ms", "share", "calls", "TFLOP/s", "")
    _rows(table, rank, lambda work: f"{work.kind}, {work.phase}: {work.name[:80]}", None, ROWS)
    return table


def planned(pairs: Mapping[str, tuple[float, float]]) -> Table:
    table = _table("beside the plan of 'strata plan'", "class", "planned ms", "measured ms", "ratio")
    for name, (expected, measured) in pairs.items():
        ratio = f"{measured / expected:.2f}" if expected else ""
        table.add_row(name, f"{expected * 1e3:,.2f}", f"{measured * 1e3:,.2f}", ratio)
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _rows(table: Table, rank: RankSummary, name: Callable[[Work], str], peak: float | None, most: int | None) -> None:
    groups: dict[str, list[Work]] = defaultdict(list)
    for work in rank.works:
        groups[name(work)].append(work)
    groups.pop("", None)
    steps = len(rank.steps)
    for key, members in sorted(groups.items(), key=lambda each: -sum(work.seconds for work in each[1]))[:most]:
        seconds, flops = (sum(values) / steps for values in zip(*((w.seconds, w.flops) for w in members), strict=True))
        rate = flops / seconds if seconds else 0.0
        table.add_row(
            key,
            f"{seconds * 1e3:,.2f}",
            f"{seconds / rank.own:.1%}",
            f"{len(members) / steps:,.0f}",
            f"{rate / 1e12:,.3g}" if rate else "",
            f"{rate / peak:.0%}" if rate and peak else "",
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
