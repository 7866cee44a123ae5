"""Command `strata monitor`."""

from typing import Annotated

import typer


def monitor(
    port: Annotated[int, typer.Option(help="Port of Prometheus.")] = 9090,
    grafana_port: Annotated[int, typer.Option(help="Port of Grafana.")] = 3000,
    url: Annotated[list[str] | None, typer.Option(help="Endpoint to scrape; repeat the option for several.")] = None,
    retention: Annotated[str, typer.Option(help="Retention time of the data.")] = "15d",
) -> None:
    """Monitor runs, endpoints and GPUs of this machine with Prometheus, and with Grafana if it is installed."""
    from strata.monitoring.monitor import watch

    watch(port, grafana_port, url or ["http://127.0.0.1:8000"], retention)
