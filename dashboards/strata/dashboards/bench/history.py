"""Writes the past of a fleet into a Prometheus database, as blocks that promtool makes from OpenMetrics text.

Only series that boards read over a range of time need a past, each as long as the longest range that reads it.
"""

import random
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from strata.dashboards.bench.fleet import HOUR_S, SCRAPE_S, Fleet, Series
from strata.monitoring.prometheus import manifests, server
from strata.platform.errors import UserError

BLOCK_S = 2 * HOUR_S  # Prometheus' smallest block; promtool reads its input once for each
FLEET_STEP_S = int(manifests.FLEET_INTERVAL.removesuffix("s"))
POOL = 16  # random values of a series, which it repeats; a new one for each sample would take most of the time


@dataclass(frozen=True)
class Span:
    """Series with their past in seconds, and the seconds between samples."""

    seconds: int
    series: Callable[[], Iterable[Series]]
    step_s: int = SCRAPE_S


def spans(fleet: Fleet) -> tuple[Span, ...]:
    """Ranges of the boards: an hour for nodes and engines, three for runs and objectives, a day for teams. The window of the rule
    of idle GPUs is five minutes."""
    return (
        Span(300, fleet.utilization, FLEET_STEP_S),
        Span(HOUR_S, fleet.node_rules, FLEET_STEP_S),
        Span(HOUR_S, lambda: (series for node in fleet.nodes for series in fleet.ray_node(node))),
        Span(HOUR_S, fleet.serving),
        Span(3 * HOUR_S, fleet.on_call),
        Span(3 * HOUR_S, fleet.training),
        Span(3 * HOUR_S, fleet.objectives),
        Span(24 * HOUR_S, fleet.team_rules, FLEET_STEP_S),
    )


def write(fleet: Fleet, folder: Path, end: int, say: Callable[[str], None]) -> int:
    """Writes the past up to `end` (Unix seconds) into the database in `folder`. Returns the number of samples."""
    count = 0
    parts = spans(fleet)
    first = end - max(part.seconds for part in parts)
    for begin in range(first // BLOCK_S * BLOCK_S, end, BLOCK_S):
        text = folder.with_suffix(".om")
        with text.open("w") as file:
            written = sum(_write_window(file, part, begin, end) for part in parts)
            file.write("# EOF\n")
        if written:
            _import(text, folder)
            say(f"wrote {written:,} samples of {(end - begin) / HOUR_S:.0f} h ago and later")
        text.unlink()
        count += written
    return count


def _write_window(file: TextIO, span: Span, begin: int, end: int) -> int:
    """Writes the samples of one block. Returns their number."""
    times = range(max(begin, _aligned(end - span.seconds)), min(begin + BLOCK_S, end), span.step_s)
    if not times:
        return 0
    stamps = [f" {time}\n" for time in times]
    rng = random.Random(begin)
    count = 0
    for series in span.series():
        prefix = f"{series.text} "
        values = _values(series, times, rng)
        file.write("".join([prefix + value + stamp for value, stamp in zip(values, stamps, strict=True)]))
        count += len(stamps)
    return count


def _values(series: Series, times: range, rng: random.Random) -> list[str]:
    if series.grows:
        return [f"{series.mean * time:.0f}" for time in times]
    pool = [f"{series.value(0, rng):.6g}" for _ in range(POOL)]
    return (pool * (len(times) // POOL + 1))[: len(times)]


def _aligned(seconds: int) -> int:
    return seconds // SCRAPE_S * SCRAPE_S


def _import(text: Path, folder: Path) -> None:
    command = [server.binary("promtool"), "tsdb", "create-blocks-from", "openmetrics", "--quiet", str(text), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"promtool could not write the past: {done.stderr.strip()[-300:]}", "Check the space on the disk.")
