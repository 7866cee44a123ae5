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
    prometheus: Annotated[
        str | None, typer.Option(help="Show a cluster instead of this machine: URL of its Prometheus.", show_default=False)
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="With --prometheus: only this Ray cluster.", show_default=False)] = None,
    namespace: Annotated[
        str | None, typer.Option(help="With --prometheus: only this namespace, which is a team.", show_default=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds between updates. Default: 1, with --prometheus 5.", show_default=False),
    ] = None,
) -> None:
    """Show GPUs or CPU cores, training runs and endpoint latencies, live in the terminal.

    With --prometheus, show a cluster: GPUs by node, teams and the cost of their idle GPUs, runs, endpoint and alerts."""
    from strata.monitoring.top import command
    from strata.platform.errors import UserError

    if prometheus is not None:
        command.watch_cluster(prometheus, cluster, namespace, once, interval)
    elif cluster is not None or namespace is not None:
        raise UserError(
            "--cluster and --namespace need a Prometheus server.", "Add --prometheus URL, such as http://127.0.0.1:9090."
        )
    else:
        command.watch(url, once, interval)
