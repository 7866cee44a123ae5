"""Tables and JSON of `strata bench monitoring`."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from strata.dashboards.bench.measure import CORES, Measured, Timing, median
from strata.platform import benchmark_record

BAR_S = 2.0


def boards(measured: Measured) -> dict[str, list[Timing]]:
    """Timings by board, in the order in which they were measured."""
    return {board: measured.of(board) for board in dict.fromkeys(timing.board for timing in measured.timings)}


def as_json(measured: Measured) -> dict[str, Any]:
    fleet = measured.fleet
    return {
        **benchmark_record.header("monitoring"),
        "gpus": fleet.gpus,
        "nodes": len(fleet.nodes),
        "prometheus_cores": CORES,
        "load_before_queries": measured.load,
        "scraped_series": measured.scraped_series,
        "remote_write_series": measured.remote_write_series,
        "series": measured.series,
        "samples_per_second": measured.samples_per_second,
        "bytes_per_sample": measured.bytes_per_sample,
        "history_samples": measured.history_samples,
        "memory_bytes": measured.memory_bytes,
        "rule_seconds": measured.rule_seconds,
        "bar_s": BAR_S,
        "boards": [_board(name, timings) for name, timings in boards(measured).items()],
        "queries": [asdict(timing) for timing in measured.timings],
    }


def _board(name: str, timings: list[Timing]) -> dict[str, Any]:
    slowest = max(timings, key=lambda timing: timing.seconds)
    return {
        "board": name,
        "queries": len(timings),
        "median_s": median(timings),
        "slowest_s": slowest.seconds,
        "slowest": slowest.panel,
        "most_cpu_s": max(timing.cpu_seconds for timing in timings),
        "most_series": max(timing.series for timing in timings),
        "most_samples": max(timing.samples for timing in timings),
        "empty": sum(timing.series == 0 for timing in timings),
    }


def show(run: dict[str, Any], console: Console) -> None:
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (
        ("GPUs, nodes", f"{run['gpus']:,}, {run['nodes']:,}"),
        ("series, of these scraped", f"{run['series']:,}, {run['scraped_series']:,}"),
        ("series for remote write", f"{run['remote_write_series']:,}"),
        ("samples per second", f"{run['samples_per_second']:,.0f}"),
        ("bytes per sample on disk", f"{run['bytes_per_sample']:.2f}"),
        ("memory of Prometheus", f"{run['memory_bytes'] / 2**30:.1f} GiB"),
        ("evaluation of all rules", f"{sum(run['rule_seconds'].values()):.2f} s"),
        ("load of the machine", f"{run['load_before_queries']:.1f}"),
    ):
        facts.add_row(name, value)
    console.print(facts)
    table = Table("board", "queries", "median", "slowest", "panel", "CPU", "series", "samples", "empty", box=None, pad_edge=False)
    for board in run["boards"]:
        style = "bold red" if board["slowest_s"] > run["bar_s"] else ""
        table.add_row(
            board["board"],
            str(board["queries"]),
            f"{board['median_s']:.3f} s",
            f"{board['slowest_s']:.3f} s",
            board["slowest"],
            f"{board['most_cpu_s']:.2f} s",
            str(board["most_series"]),
            f"{board['most_samples']:,}",
            str(board["empty"]),
            style=style,
        )
    console.print(table)
