"""Renders `strata top` with rich, fitted to the size of the terminal."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from strata.monitoring.gpu.nvml import Gpu, Reading
from strata.monitoring.top.endpoint import Absent, Endpoint, Latency, Recently, Replica
from strata.monitoring.top.machine import Cores
from strata.monitoring.top.runs import Progress

BLOCKS = "▁▂▃▄▅▆▇█"
BARS = ((110, 20), (72, 8), (0, 0))  # (columns of the terminal, width of the bars)
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
        bars = next(width for columns, width in BARS if options.max_width >= columns)
        whole = Group(*self._parts(bars, processes=True))
        fits = options.height is None or len(console.render_lines(whole, options.update(height=None))) <= options.height
        yield whole if fits else Group(*self._parts(bars, processes=False))

    def _parts(self, bars: int, processes: bool) -> Iterator[RenderableType]:
        if self.gpus.gpus or self.gpus.lost:
            yield _heading(f"GPUs of {self.node}")
            yield from _gpus(self.gpus, bars)
            if processes:
                yield from _processes(self.gpus)
        else:
            yield _heading(f"Cores of {self.node}")
            yield _cores(self.cores, bars)
            yield _note(f"no GPU: {self.gpus.problem}")
        yield _heading("Training")
        yield _runs(self.runs, bars) if self.runs else _note("no run is training")
        yield _heading(f"Endpoint {self.url}")
        if isinstance(self.endpoint, Absent):
            yield _note(f"no endpoint at {self.url}: {self.endpoint.reason}")
        else:
            yield from _endpoint(self.endpoint, bars)


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


def _heading(text: str) -> RenderableType:
    return Rule(Text(text, style="bold"), align="left", style="dim")


def _note(text: str) -> RenderableType:
    return Padding(Text(text, style="dim"), (0, 0, 0, 2))


def _grid(*justify: str, wrap_last: bool = False) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for number, side in enumerate(justify, start=1):
        wraps = wrap_last and number == len(justify)
        grid.add_column(justify="right" if side == "right" else "left", no_wrap=not wraps, overflow="ellipsis")
    return grid


def _row(grid: Table, *cells: RenderableType) -> None:
    """Adds strings as plain text, because rich would read brackets in names as markup."""
    grid.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _bar(share: float | None, width: int, colour: str | None = None) -> RenderableType:
    if share is None or not width:
        return ""
    colour = colour or ("red" if share >= 0.95 else "yellow" if share >= 0.8 else "green")
    return Bar(1.0, 0.0, min(1.0, share), width=width, color=colour, bgcolor="grey23")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f}"


def _gpus(reading: Reading, bars: int) -> Iterator[RenderableType]:
    grid = _grid("right", "left", "left", "right", "left", "right", "right", "right", "left")
    for gpu in reading.gpus:
        _row(
            grid,
            f"  {gpu.index}",
            gpu.name.removeprefix("NVIDIA "),
            _bar(gpu.utilization, bars),
            _percent(gpu.utilization),
            _bar(gpu.memory_used / gpu.memory_total if gpu.memory_used is not None and gpu.memory_total else None, bars),
            f"{_gib(gpu.memory_used)}/{_gib(gpu.memory_total)} GiB",
            _power(gpu),
            "-" if gpu.temperature is None else f"{gpu.temperature:.0f} °C",
            Text(", ".join(sorted(gpu.throttles)), style="bold red") if gpu.throttles else "",
        )
    yield grid
    for lost in reading.lost:
        yield Padding(Text(f"GPU {lost.index} does not respond: {lost.reason}", style="bold red"), (0, 0, 0, 2))


def _processes(reading: Reading) -> Iterator[RenderableType]:
    grid = _grid("right", "right", "left", "right", "right")
    for gpu in reading.gpus:
        for process in sorted(gpu.processes, key=lambda one: -(one.memory or 0)):
            size = "-" if process.memory is None else f"{_gib(process.memory)} GiB"
            _row(grid, f"  {gpu.index}", str(process.pid), process.actor, size, _percent(process.utilization))
    if grid.row_count:
        yield _note("processes")
        yield grid


def _power(gpu: Gpu) -> str:
    if gpu.power is None:
        return "-"
    return f"{gpu.power:.0f} W" if gpu.power_limit is None else f"{gpu.power:.0f}/{gpu.power_limit:.0f} W"


def _cores(cores: Cores, bars: int) -> RenderableType:
    grid = _grid("left", "left", "right", "left", wrap_last=True)
    mean = sum(cores.loads) / len(cores.loads)
    _row(grid, f"  {len(cores.loads)} cores", _bar(mean, bars), _percent(mean), levels(cores.loads))
    used = 1 - cores.memory_available / cores.memory_total
    free = f"{_gib(cores.memory_available)} of {_gib(cores.memory_total)} GiB free"
    _row(grid, "  memory", _bar(used, bars), _percent(used), free)
    return grid


def _runs(runs: Sequence[Progress], bars: int) -> RenderableType:
    """Two lines per run: progress, and losses."""
    grid = _grid("left", "left", "left", wrap_last=True)
    for run in runs:
        _row(grid, f"  {run.name}", _bar(run.step / run.steps if run.steps else 0.0, bars, "cyan"), _pace(run))
        if run.losses:
            course = [_course("loss", run.losses, bars + 8), _course("validation", run.validation_losses, bars)]
            _row(grid, "", "", "  ".join(part for part in course if part))
    return grid


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


def _endpoint(endpoint: Endpoint, bars: int) -> Iterator[RenderableType]:
    roles = Counter(replica.role for replica in endpoint.replicas)
    counted = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    span = f", last {duration(endpoint.recently.seconds)}" if endpoint.recently else ""
    yield Text(f"  {', '.join(endpoint.models)}: {counted}{span}")
    yield _traffic(endpoint, endpoint.recently) if endpoint.recently else _note("measuring …")
    engines = [replica for replica in endpoint.replicas if replica.role != "gateway"]
    if engines:
        yield _engines(engines, bars)


def _traffic(endpoint: Endpoint, recently: Recently) -> RenderableType:
    grid = _grid("left", "left", wrap_last=True)
    _row(grid, "  TTFT", _latency(recently.first_token))
    _row(grid, "  ITL", _latency(recently.inter_token))
    _row(grid, "  requests", f"{recently.requests_per_s:.1f}/s  {endpoint.in_flight:.0f} in flight  {endpoint.queued:.0f} queued")
    _row(grid, "  refused", _refused(recently))
    _row(grid, "  tokens", f"{recently.tokens_per_s:,.0f}/s out  {recently.prompt_tokens_per_s:,.0f}/s in")
    _row(grid, "  prefills", "  ".join(f"{count:.0f} {where}" for where, count in sorted(recently.prefills.items())) or "-")
    return grid


def _latency(latency: Latency | None) -> str:
    return "-" if latency is None else f"p50 {milliseconds(latency.p50)}  p99 {milliseconds(latency.p99)}"


def _refused(recently: Recently) -> Text:
    reasons = {reason: count for reason, count in sorted(recently.rejections.items()) if count}
    rejected = f"{sum(reasons.values()):.0f} rejected"
    if reasons:
        rejected += f" ({', '.join(f'{reason} {count:.0f}' for reason, count in reasons.items())})"
    return Text(f"{rejected}  {recently.errors:.0f} failed", style="bold red" if reasons or recently.errors else "")


def _engines(replicas: Sequence[Replica], bars: int) -> RenderableType:
    grid = _grid("left", "left", "left", "right", "left")
    for replica in replicas:
        load = "" if replica.running is None else f"{replica.running:.0f} running, {replica.waiting or 0:.0f} waiting"
        _row(grid, f"  {replica.role}", replica.name, _bar(replica.kv_usage, bars), f"KV {_percent(replica.kv_usage)}", load)
    return grid
