"""Renders `strata top` with rich, fitted to the size of the terminal."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from strata.monitoring.gpu.nvml import Gpu, Reading
from strata.monitoring.top.endpoint import Absent, Endpoint, Latency, Recently, Replica
from strata.monitoring.top.machine import Cores
from strata.monitoring.top.parts import (
    bar,
    bar_width,
    duration,
    gib,
    grid,
    heading,
    levels,
    milliseconds,
    note,
    percent,
    row,
    sparkline,
)
from strata.monitoring.top.runs import Progress

MOST_ENGINES = 16
SILENT_S = 60.0  # a run without a step for this long is marked


@dataclass(frozen=True)
class Snapshot:
    node: str
    gpus: Reading
    cores: Cores
    runs: Sequence[Progress]
    url: str
    endpoint: Endpoint | Absent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bars = bar_width(options.max_width)
        whole = Group(*self._parts(bars, processes=True))
        fits = options.height is None or len(console.render_lines(whole, options.update(height=None))) <= options.height
        yield whole if fits else Group(*self._parts(bars, processes=False))

    def _parts(self, bars: int, processes: bool) -> Iterator[RenderableType]:
        if self.gpus.gpus or self.gpus.lost:
            yield heading(f"GPUs of {self.node}")
            yield from _gpus(self.gpus, bars)
            if processes:
                yield from _processes(self.gpus)
        else:
            yield heading(f"Cores of {self.node}")
            yield _cores(self.cores, bars)
            yield note(f"no GPU: {self.gpus.problem}")
        yield heading("Training")
        yield run_table(self.runs, bars) if self.runs else note("no run is training")
        yield heading(f"Endpoint {self.url}")
        if isinstance(self.endpoint, Absent):
            yield note(f"no endpoint at {self.url}: {self.endpoint.reason}")
        else:
            yield from endpoint_parts(self.endpoint, bars)


def _gpus(reading: Reading, bars: int) -> Iterator[RenderableType]:
    table = grid("right", "left", "left", "right", "left", "right", "right", "right", "left")
    for gpu in reading.gpus:
        row(
            table,
            f"  {gpu.index}",
            gpu.name.removeprefix("NVIDIA "),
            bar(gpu.utilization, bars),
            percent(gpu.utilization),
            bar(gpu.memory_used / gpu.memory_total if gpu.memory_used is not None and gpu.memory_total else None, bars),
            f"{gib(gpu.memory_used)}/{gib(gpu.memory_total)} GiB",
            _power(gpu),
            "-" if gpu.temperature is None else f"{gpu.temperature:.0f} °C",
            Text(", ".join(sorted(gpu.throttles)), style="bold red") if gpu.throttles else "",
        )
    yield table
    for lost in reading.lost:
        yield Padding(Text(f"GPU {lost.index} does not respond: {lost.reason}", style="bold red"), (0, 0, 0, 2))


def _processes(reading: Reading) -> Iterator[RenderableType]:
    table = grid("right", "right", "left", "right", "right")
    for gpu in reading.gpus:
        for process in sorted(gpu.processes, key=lambda one: -(one.memory or 0)):
            size = "-" if process.memory is None else f"{gib(process.memory)} GiB"
            row(table, f"  {gpu.index}", str(process.pid), process.actor, size, percent(process.utilization))
    if table.row_count:
        yield note("processes")
        yield table


def _power(gpu: Gpu) -> str:
    if gpu.power is None:
        return "-"
    return f"{gpu.power:.0f} W" if gpu.power_limit is None else f"{gpu.power:.0f}/{gpu.power_limit:.0f} W"


def _cores(cores: Cores, bars: int) -> RenderableType:
    table = grid("left", "left", "right", "left", wrap_last=True)
    mean = sum(cores.loads) / len(cores.loads)
    row(table, f"  {len(cores.loads)} cores", bar(mean, bars), percent(mean), levels(cores.loads))
    used = 1 - cores.memory_available / cores.memory_total
    free = f"{gib(cores.memory_available)} of {gib(cores.memory_total)} GiB free"
    row(table, "  memory", bar(used, bars), percent(used), free)
    return table


def run_table(runs: Sequence[Progress], bars: int) -> RenderableType:
    """Two lines per run: progress, and losses."""
    table = grid("left", "left", "left", wrap_last=True)
    for run in runs:
        row(table, f"  {run.name}", bar(run.step / run.steps if run.steps else 0.0, bars, "cyan"), _pace(run))
        if run.losses:
            course = [_course("loss", run.losses, bars + 8), _course("validation", run.validation_losses, bars)]
            row(table, "", "", "  ".join(part for part in course if part))
    return table


def _pace(run: Progress) -> Text:
    text = Text(f"{run.step}/{run.steps}")
    if run.silent_for is None:
        return text.append("  starting", style="dim")
    if run.silent_for >= SILENT_S:
        text.append(f"  no step for {duration(run.silent_for)}", style="bold yellow")
    if run.tokens_per_s is not None:
        text.append(f"  {run.tokens_per_s:,.0f} tokens/s")
    if run.mfu is not None:
        text.append(f"  MFU {run.mfu:.0%}")
    if run.seconds_left is not None:
        text.append(f"  {duration(run.seconds_left)} left")
    if run.checkpoint_age is not None:
        text.append(f"  saved {duration(run.checkpoint_age)} ago")
    return text


def _course(name: str, losses: Sequence[float], width: int) -> str:
    return f"{name} {losses[-1]:.3f} {sparkline(losses, width)}".rstrip() if losses else ""


def endpoint_parts(endpoint: Endpoint, bars: int) -> Iterator[RenderableType]:
    roles = Counter(replica.role for replica in endpoint.replicas)
    counted = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    span = f", last {duration(endpoint.recently.seconds)}" if endpoint.recently else ""
    yield Text(f"  {', '.join(endpoint.models)}: {counted}{span}")
    yield _traffic(endpoint, endpoint.recently) if endpoint.recently else note("measuring …")
    engines = [replica for replica in endpoint.replicas if replica.role != "gateway"]
    if engines:
        fullest = sorted(engines, key=lambda engine: -(engine.kv_usage or 0.0))[:MOST_ENGINES]
        yield _engines([engine for engine in engines if engine in fullest], bars)
        if len(engines) > len(fullest):
            yield note(f"the {len(fullest)} fullest of {len(engines)} engines")


def _traffic(endpoint: Endpoint, recently: Recently) -> RenderableType:
    table = grid("left", "left", wrap_last=True)
    row(table, "  TTFT", _latency(recently.first_token))
    row(table, "  ITL", _latency(recently.inter_token))
    row(table, "  requests", f"{recently.requests_per_s:.1f}/s  {endpoint.in_flight:.0f} in flight  {endpoint.queued:.0f} queued")
    row(table, "  refused", _refused(recently))
    row(table, "  tokens", f"{recently.tokens_per_s:,.0f}/s out  {recently.prompt_tokens_per_s:,.0f}/s in")
    row(table, "  prefills", "  ".join(f"{count:.0f} {where}" for where, count in sorted(recently.prefills.items())) or "-")
    return table


def _latency(latency: Latency | None) -> str:
    return "-" if latency is None else f"p50 {milliseconds(latency.p50)}  p99 {milliseconds(latency.p99)}"


def _refused(recently: Recently) -> Text:
    reasons = {reason: count for reason, count in sorted(recently.rejections.items()) if count}
    rejected = f"{sum(reasons.values()):.0f} rejected"
    if reasons:
        rejected += f" ({', '.join(f'{reason} {count:.0f}' for reason, count in reasons.items())})"
    return Text(f"{rejected}  {recently.errors:.0f} failed", style="bold red" if reasons or recently.errors else "")


def _engines(replicas: Sequence[Replica], bars: int) -> RenderableType:
    table = grid("left", "left", "left", "right", "left")
    for replica in replicas:
        load = "" if replica.running is None else f"{replica.running:.0f} running, {replica.waiting or 0:.0f} waiting"
        row(table, f"  {replica.role}", replica.name, bar(replica.kv_usage, bars), f"KV {percent(replica.kv_usage)}", load)
    return table
