"""`strata monitor`: runs Prometheus, the GPU exporter and Grafana on this machine until Ctrl-C."""

import re
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
from rich.console import Console

from strata.monitoring import grafana
from strata.monitoring.gpu import exporter
from strata.monitoring.prometheus import scrape
from strata.monitoring.prometheus import server as prometheus
from strata.platform import ports
from strata.platform.errors import UserError
from strata.platform.files import cache_dir

HOST = "127.0.0.1"
POLL_S = 1.0  # interval to look for new Ray clusters and alerts


def watch(port: int, grafana_port: int, endpoints: Sequence[str], retention: str) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if not re.fullmatch(r"[1-9]\d*[smhdwy]", retention):
        raise UserError(f"--retention '{retention}' is not a duration.", "Write a number and a unit: --retention 15d.")
    folder = cache_dir() / "monitor"
    with ExitStack() as stack:
        # Claims the port instead of only checking it: a second, concurrent monitor would use the first monitor's Prometheus.
        stack.enter_context(ports.claim(port, HOST, "--port"))
        gpu_port = _start_gpu_exporter(stack, console)
        server = stack.enter_context(prometheus.running(folder, port, endpoints, gpu_port, retention))
        pages = "" if server.has_ui() else f"  (this build has no web UI; query it at {server.url}/api/v1/query)"
        console.print(f"Prometheus  {server.url}{pages}")
        _start_grafana(stack, folder / "grafana", grafana_port, server.url, console)
        _follow(server, folder, stop, console)
    console.print("Stopped. The next start uses the same data.")


def _start_gpu_exporter(stack: ExitStack, console: Console) -> int:
    """Starts the exporter in this process, unless an exporter already listens on its port."""
    port = scrape.GPU_EXPORTER_PORT
    return stack.enter_context(exporter.running(HOST, port, console.print)) if ports.is_free(port) else port


def _start_grafana(stack: ExitStack, folder: Path, port: int, prometheus_url: str, console: Console) -> None:
    command = grafana.find()
    if command is None:
        console.print(grafana.HOW_TO_GET_IT)
        return
    stack.enter_context(ports.claim(port, HOST, "--grafana-port"))
    console.print(f"Grafana     {stack.enter_context(grafana.running(command, folder, port, prometheus_url))}")


def _follow(server: prometheus.Server, folder: Path, stop: threading.Event, console: Console) -> None:
    """Updates the list of Ray clusters for Prometheus, and prints alerts as they start and stop firing."""
    printed, firing = False, set[str]()
    while not stop.wait(POLL_S):
        prometheus.write_ray_targets(folder)
        try:
            health = server.health()
        except httpx.HTTPError as error:
            log = folder / "prometheus.log"
            raise UserError(f"Prometheus no longer responds ({error}): {prometheus.last_line(log)}", f"See {log}.") from None
        if not printed and health.up and not health.waiting:  # `up` counts Prometheus itself
            console.print(summary(health))
            console.print("Press Ctrl-C to stop.")
            printed = True
        now = set(health.firing)
        for name in sorted(now - firing):
            console.print(f"alert  {name} is firing")
        for name in sorted(firing - now):
            console.print(f"alert  {name} is resolved")
        firing = now


def summary(health: prometheus.Health) -> str:
    """One line on targets, series, rules and alerts. A target that is down is no error: an endpoint may not be served yet."""
    absent = f" (down: {', '.join(health.down)})" if health.down else ""
    return f"{health.up} targets up{absent}, {health.series} series, {health.rules} rules, {len(health.firing)} alerts firing"
