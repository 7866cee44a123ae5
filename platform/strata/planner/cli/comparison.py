"""Comparison of the planner with published measurements, row by row, with the error limit of each kind of row."""

from dataclasses import dataclass
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from strata.planner.cli import check_regimes
from strata.planner.cli.tables import grid
from strata.planner.units import show
from strata.planner.validation import check_collectives, check_memory, check_training
from strata.planner.validation.limits import limits_of
from strata.planner.validation.trust import REGIMES

UNSEEN = "held out, "


@dataclass(frozen=True)
class Row:
    """A published figure with the planner's. `planned` is None for a layout that `strata plan` refuses."""

    name: str
    published: float
    planned: float | None
    unit: str
    error: float | None
    note: str = ""


@dataclass(frozen=True)
class Check:
    """Rows of one kind with their error limits. Rows without limits are informative."""

    name: str
    tables: dict[str, list[Row]]
    mean: float
    worst: float
    mean_bar: float | None = None
    worst_bar: float | None = None
    mean_kind: str = "mean"
    signed: float | None = None  # signed mean error

    @property
    def passed(self) -> bool:
        bars = ((self.mean, self.mean_bar), (self.worst, self.worst_bar))
        return all(bar is None or error <= bar for error, bar in bars)


def checks() -> list[Check]:
    return [_training(), _other_runs(), _zero(), _collectives(), *_regimes()]


def _regimes() -> list[Check]:
    """Held-out figures, without limits: no constant was fitted to them, so their errors are those to expect of a plan."""
    found = []
    for name in check_regimes.regime_names():
        rows = check_regimes.regime(name)
        errors = check_regimes.errors(rows)
        by_source = {
            f"{source} ({REGIMES[name]})": [
                Row(row.name, row.published, row.planned, "", row.error, "; ".join(filter(None, (row.unit, row.note))))
                for row in group
            ]
            for source, group in groupby(rows, key=lambda row: row.source)
        }
        worst = max(errors.highest, -errors.lowest)
        found.append(Check(f"{UNSEEN}{REGIMES[name]}", by_source, errors.mean, worst, signed=errors.signed))
    return found


def _training() -> Check:
    found = check_training.rows()
    return _limited("step time", _by_table(found), check_training.mean_error(found), check_training.worst_error(found))


def _other_runs() -> Check:
    found = check_training.other_runs()
    return Check(
        "runs with too few published settings for a limit",
        _by_table(found),
        check_training.mean_error(found),
        check_training.worst_error(found),
    )


def _by_table(rows: list[check_training.Row]) -> dict[str, list[Row]]:
    return {
        name: [
            Row(
                row.model,
                row.published,
                row.planned,
                row.unit,
                row.error,
                "; ".join(filter(None, ("" if row.unit == "s" else row.unit, row.note))),
            )
            for row in group
        ]
        for name, group in groupby(rows, key=lambda row: row.table)
    }


def _zero() -> Check:
    """Memory of the ZeRO paper. An error counts from the nearest value that rounds to the published figure."""
    found = check_memory.zero_table()
    rows = [
        Row(
            f"{row.params_b:g}B parameters, {row.dp} GPU{'s' * (row.dp > 1)}, ZeRO-{row.zero}",
            row.published,
            row.predicted,
            "GB",
            row.error,
        )
        for row in found
    ]
    tables = {"ZeRO paper: state of a GPU, GB": rows}
    return _limited("memory", tables, check_memory.mean_error(found), check_memory.worst_error(found))


def _collectives() -> Check:
    found = check_collectives.published_allreduce()
    rows = [Row(show(row.bytes, "B"), row.measured, row.predicted, "s", row.error, row.algorithm) for row in found]
    tables = {"all-reduce on 8 H200, NCCL": rows}
    mean, worst = check_collectives.mean_error(found), check_collectives.worst_error(found)
    return _limited("collectives", tables, mean, worst, mean_kind="geometric mean")


def _limited(name: str, tables: dict[str, list[Row]], mean: float, worst: float, mean_kind: str = "mean") -> Check:
    limits = limits_of(name)
    return Check(name, tables, mean, worst, limits.mean, limits.worst, mean_kind)


def tables(found: list[Check]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for check in found:
        for name, rows in check.tables.items():
            table = grid(name, [""], ["published", "planned", "error"])
            noted = any(row.note for row in rows)
            if noted:
                table.add_column("")
            for row in rows:
                over = row.error is not None and check.worst_bar is not None and abs(row.error) > check.worst_bar
                error = Text("-" if row.error is None else f"{row.error:+.1%}", "red" if over else "")
                table.add_row(
                    row.name,
                    _figure(row.published, row.unit),
                    "-" if row.planned is None else _figure(row.planned, row.unit),
                    error,
                    *([row.note] if noted else []),
                )
            parts.append(table)
        parts.append(summary(check))
    parts.append(regimes(found))
    return parts


def regimes(found: list[Check]) -> RenderableType:
    """Table of the errors to expect, by regime."""
    note = "error: planned time (or memory) / published - 1; below 0 the planner is too fast (or its memory too small)"
    table = grid("by regime, held-out published figures", [""], ["figures", "mean", "signed", "from", "to"], note)
    for check in found:
        errors = [row.error for rows in check.tables.values() for row in rows if row.error is not None]
        if check.signed is not None:
            ends = f"{min(errors):+.0%}", f"{max(errors):+.0%}"
            table.add_row(check.name.removeprefix(UNSEEN), f"{len(errors)}", f"{check.mean:.1%}", f"{check.signed:+.1%}", *ends)
    return table


def summary(check: Check) -> Text:
    text = Text(f"{check.name}: ", "bold")
    text.append(
        f"{check.mean_kind} {check.mean:.1%}{_bar(check.mean_bar)}, worst {check.worst:.1%}{_bar(check.worst_bar)}", "not bold"
    )
    if check.mean_bar is not None or check.worst_bar is not None:
        text.append("  ok" if check.passed else "  over the limit", "bold green" if check.passed else "bold red")
    return text


def _bar(bar: float | None) -> str:
    return "" if bar is None else f" (limit {bar:.0%})"


def _figure(value: float, unit: str) -> str:
    return show(value, unit) if unit == "s" else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
