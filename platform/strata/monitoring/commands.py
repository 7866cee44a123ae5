"""The command `monitor`."""

from typing import Annotated

import typer


def monitor(
    port: Annotated[int, typer.Option(help="Prometheus' port.")] = 9090,
    grafana_port: Annotated[int, typer.Option(help="Grafana's port.")] = 3000,
    url: Annotated[list[str] | None, typer.Option(help="An endpoint to watch; may be given several times.")] = None,
    retention: Annotated[str, typer.Option(help="How long data is kept.")] = "15d",
) -> None:
    """Watch this machine's runs, endpoint and GPUs with Prometheus, and with Grafana where it is installed."""
    from strata.monitoring.monitor import watch

    watch(port, grafana_port, url or ["http://127.0.0.1:8000"], retention)
