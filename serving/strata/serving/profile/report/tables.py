"""Tables of a profile of an endpoint for the terminal: time by cause, steps by phase, and operators."""

from rich.table import Table

from strata.serving.profile.analysis.phases import PHASES
from strata.serving.profile.analysis.summary import CAUSES, EngineSummary, Summary
from strata.serving.profile.report.record import work_by_class

ROWS = 12


def causes(summary: Summary) -> Table:
    table = _table(f"time of the engines by cause, of {summary.window:,.2f} s", "cause", *(each.name for each in summary.engines))
    for cause in CAUSES:
        if any(each.seconds[cause] > 0 for each in summary.engines):
            table.add_row(cause, *(f"{each.seconds[cause] / each.window:.1%}" for each in summary.engines))
    return table


def phases(summary: Summary) -> Table:
    table = _table("steps by phase", "engine, phase", "count", "mean ms", "share")
    for engine in summary.engines:
        for phase in PHASES:
            if count := engine.count(phase):
                mean, share = engine.mean(phase), engine.phases[phase].seconds / engine.window
                table.add_row(f"{engine.name}, {phase}", f"{count:,}", f"{mean * 1e3:,.2f}", f"{share:.1%}")
    return table


def operators(engine: EngineSummary, peak: float | None) -> Table:
    what = "kernels" if engine.engine.trace.on_gpu else "operators"
    table = _table(f"{engine.name}: {what} with the most time", what, "ms", "share", "calls", "TFLOP/s", "of peak")
    for each in work_by_class(engine)[:ROWS]:
        rate = each["flops"] / each["s"] if each["s"] else 0.0
        table.add_row(
            " ".join(filter(None, (f"{each['phase']}: {each['name'][:60]}", each["shape"]))),
            f"{each['s'] * 1e3:,.2f}",
            f"{each['s'] / engine.window:.1%}",
            f"{each['calls']:,.0f}",
            f"{rate / 1e12:,.3g}" if rate else "",
            f"{rate / peak:.0%}" if rate and peak else "",
        )
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table
