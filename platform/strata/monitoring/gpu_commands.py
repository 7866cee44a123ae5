"""Commands `strata gpu-exporter` and `strata top`."""

from typing import Annotated

import typer


def gpu_exporter(
    port: Annotated[int, typer.Option(help="Port to serve /metrics on.")] = 9835,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 in a pod.")] = "127.0.0.1",
) -> None:
    """Export GPU metrics of this machine to Prometheus, for use without NVIDIA's DCGM exporter."""
    from strata.monitoring.gpu.exporter import serve

    serve(host, port)


def top(
    url: Annotated[str, typer.Option(help="Endpoint to show.")] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show GPUs or CPU cores, training runs and endpoint latencies, live in the terminal."""
    from strata.monitoring.top.command import watch

    watch(url, once, interval)
