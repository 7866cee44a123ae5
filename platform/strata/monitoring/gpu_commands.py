"""The commands `gpu-exporter` and `top`."""

from typing import Annotated

import typer


def gpu_exporter(
    port: Annotated[int, typer.Option(help="Port to serve /metrics on.")] = 9835,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 in a pod.")] = "127.0.0.1",
) -> None:
    """Give out this machine's GPU load for Prometheus, where NVIDIA's DCGM exporter is absent."""
    from strata.monitoring.gpu.exporter import serve

    serve(host, port)


def top(
    url: Annotated[str, typer.Option(help="The endpoint to watch.")] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """GPUs or cores, runs in progress and the endpoint's latencies, live in the terminal."""
    from strata.monitoring.top.command import watch

    watch(url, once, interval)
