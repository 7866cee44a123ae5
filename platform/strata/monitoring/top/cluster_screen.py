"""Renders a cluster for `strata top --prometheus`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from strata.monitoring.top.cluster import ALERTS_SHOWN, TEAMS_SHOWN, Alert, Cluster, Gpus, Node, Team
from strata.monitoring.top.endpoint import Absent
from strata.monitoring.top.parts import bar, bar_width, grid, heading, note, percent, row
from strata.monitoring.top.screen import endpoint_parts, run_table

NOT_SHOWN = ("__name__", "alertname", "alertstate", "severity", "job", "instance")
COLOURS = {"critical": "bold red", "warning": "yellow"}
HOT = 80.0  # °C, as on the boards


@dataclass(frozen=True)
class ClusterSnapshot:
    where: str  # server, cluster and namespace
    cluster: Cluster
    trouble: str = ""  # the reason for which the values are old

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*self._parts(bar_width(options.max_width)))

    def _parts(self, bars: int) -> Iterator[RenderableType]:
        found = self.cluster
        if self.trouble:
            yield Text(f"not updated: {self.trouble}", style="bold red")
        yield heading(f"GPUs of {self.where}")
        if found.gpus is None:
            yield note("no GPU series: no exporter, or the recording rules are not loaded")
        else:
            yield from _gpus(found.gpus, bars)
        if found.teams:
            yield heading("Teams")
            yield from _teams(found.teams)
        yield heading("Training")
        yield run_table(found.runs, bars) if found.runs else note("no run is training")
        yield heading("Endpoint")
        if isinstance(found.endpoint, Absent):
            yield note(f"no endpoint: {found.endpoint.reason}")
        else:
            yield from endpoint_parts(found.endpoint, bars)
        yield heading("Alerts")
        yield from _alerts(found.alerts)


def dollars(amount: float) -> str:
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def watts(power: float | None) -> str:
    if power is None:
        return "-"
    return f"{power:.0f} W" if power < 1000 else f"{power / 1000:,.1f} kW" if power < 1e6 else f"{power / 1e6:,.2f} MW"


def _gpus(gpus: Gpus, bars: int) -> Iterator[RenderableType]:
    table = grid("left", "left", "right", "left", wrap_last=True)
    row(
        table,
        f"  {gpus.count:,.0f} GPUs",
        bar(gpus.utilization, bars),
        percent(gpus.utilization),
        f"busy, {gpus.nodes:,.0f} nodes",
    )
    row(table, "  memory", bar(gpus.memory, bars), percent(gpus.memory), watts(gpus.power))
    row(table, "  idle", bar(gpus.idle / gpus.count, bars), percent(gpus.idle / gpus.count), f"{gpus.idle:,.0f} GPUs")
    if gpus.throttled:
        throttled = ", ".join(f"{reason} {count:,.0f}" for reason, count in gpus.throttled.items())
        row(table, "  throttled", "", "", Text(throttled, style="bold red"))
    yield table
    for title, nodes in (("least busy nodes", gpus.least_busy), ("hottest nodes", gpus.hottest)):
        if nodes:
            yield note(title)
            yield _nodes(nodes, bars)


def _nodes(nodes: Sequence[Node], bars: int) -> RenderableType:
    table = grid("left", "right", "left", "right", "right", "right", "right")
    for node in nodes:
        heat = "-" if node.temperature is None else f"{node.temperature:.0f} °C"
        row(
            table,
            f"  {node.name}",
            f"{node.gpus:.0f} GPUs",
            bar(node.utilization, bars),
            percent(node.utilization),
            f"memory {percent(node.memory)}",
            watts(node.power),
            Text(heat, style="bold red" if (node.temperature or 0.0) >= HOT else ""),
        )
    return table


def _teams(teams: Sequence[Team]) -> Iterator[RenderableType]:
    table = grid("left", "right", "right", "right", "right", "right")
    head = ("  team", "GPUs", "idle", "cost", "idle cost", "idle cost, 24 h")
    row(table, *(Text(word, style="dim") for word in head))
    for team in teams[:TEAMS_SHOWN]:
        row(
            table,
            f"  {team.name or '(no team)'}",
            f"{team.gpus:,.0f}",
            f"{team.idle:,.0f}",
            f"{dollars(team.dollars_per_hour)}/h",
            Text(f"{dollars(team.idle_dollars_per_hour)}/h", style="bold yellow" if team.idle_dollars_per_hour else ""),
            dollars(team.idle_dollars_of_a_day),
        )
    yield table
    if len(teams) > TEAMS_SHOWN:
        yield note(f"and {len(teams) - TEAMS_SHOWN} more teams")


def _alerts(alerts: Sequence[Alert]) -> Iterator[RenderableType]:
    if not alerts:
        yield note("no alert fires")
        return
    table = grid("left", "left", "left", wrap_last=True)
    for alert in alerts[:ALERTS_SHOWN]:
        about = " ".join(f"{name}={value}" for name, value in sorted(alert.labels.items()) if name not in NOT_SHOWN)
        row(table, Text(f"  {alert.severity}", style=COLOURS.get(alert.severity, "")), alert.name, about)
    yield table
    if len(alerts) > ALERTS_SHOWN:
        counted = Counter(alert.severity for alert in alerts)
        yield note("in all " + ", ".join(f"{count} {severity}" for severity, count in counted.items()))
