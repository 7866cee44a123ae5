"""Command `strata bench monitoring`. Imports nothing heavy: every command loads this module."""

from pathlib import Path
from typing import Annotated

import typer


def bench_monitoring(
    gpus: Annotated[int, typer.Option(help="GPUs of the simulated fleet, eight to a node.", min=8)] = 16384,
    live: Annotated[float, typer.Option(help="Seconds of scraping before the queries.", min=5)] = 150,
    json: Annotated[Path | None, typer.Option(help="Output file. Default: bench/monitoring.json in the cache folder.")] = None,
) -> None:
    """Time every board query on a real Prometheus with the series of a large fleet.

    It writes up to a day of history, scrapes simulated exporters, evaluates the recording rules and alerts, and sends the queries
    of all boards with their default time ranges."""
    import json as json_text

    from rich.console import Console

    from strata.dashboards.bench import report
    from strata.dashboards.bench.measure import Settings, measure
    from strata.platform.errors import UserError
    from strata.platform.files import cache_dir, write_atomic

    console = Console()
    run = report.as_json(measure(Settings(gpus, live), lambda text: console.print(text, style="dim")))
    report.show(run, console)
    path = json or cache_dir() / "bench" / "monitoring.json"
    write_atomic(path, json_text.dumps(run, indent=2) + "\n")
    console.print(f"wrote {path}")
    slow = [query for query in run["queries"] if query["seconds"] > run["bar_s"]]
    if slow:
        longest = max(query["seconds"] for query in slow)
        raise UserError(
            f"{len(slow)} queries took longer than {run['bar_s']:.0f} s, the slowest {longest:.1f} s.",
            "Repeat it on an idle machine; if it stays, add a recording rule for the panels in the table.",
        )
