"""`strata top`: polls a machine with its runs and endpoint, or a Prometheus server, and redraws the screen."""

import signal
import time
from contextlib import closing
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live

from strata.monitoring.gpu.exporter import node_name
from strata.monitoring.gpu.nvml import Cards
from strata.monitoring.top import machine
from strata.monitoring.top.cluster import ClusterWatch
from strata.monitoring.top.cluster_screen import ClusterSnapshot
from strata.monitoring.top.endpoint import EndpointWatch
from strata.monitoring.top.prometheus import Prometheus
from strata.monitoring.top.runs import RunWatch
from strata.monitoring.top.screen import Snapshot
from strata.platform.errors import UserError

LOCAL_INTERVAL_S, CLUSTER_INTERVAL_S = 1.0, 5.0  # Prometheus has new values every 15 s


class Polled(Protocol):
    """A source of screens. `has_rates`: the first poll lacks what is a difference between two."""

    has_rates: bool

    def poll(self) -> RenderableType: ...

    def close(self) -> None: ...


def watch(url: str, once: bool, interval: float | None) -> None:
    _watch(Watching(url), once, interval or LOCAL_INTERVAL_S)


def watch_cluster(url: str, cluster: str | None, namespace: str | None, once: bool, interval: float | None) -> None:
    _watch(ClusterWatching(Prometheus(url, cluster, namespace)), once, interval or CLUSTER_INTERVAL_S)


def _watch(source: Polled, once: bool, interval: float) -> None:
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # restores the terminal as Ctrl-C does
    try:
        with closing(source) as watching:
            if once or not console.is_terminal:
                _print(console, watching, interval)
            else:
                _follow(console, watching, interval)
    except KeyboardInterrupt:
        return


class Watching:
    """Polls machine, runs and endpoint. Loads and rates are differences between two polls, so the first poll has none."""

    has_rates = True

    def __init__(self, url: str) -> None:
        self._url = url
        self._cards = Cards()
        self._runs = RunWatch()
        self._endpoint = EndpointWatch(url)

    def poll(self) -> Snapshot:
        return Snapshot(node_name(), self._cards.read(), machine.poll(), self._runs.poll(), self._url, self._endpoint.poll())

    def close(self) -> None:
        self._cards.close()
        self._endpoint.close()


class ClusterWatching:
    """Polls a Prometheus server. The first poll raises errors; later ones show the last values with the reason."""

    has_rates = False

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self._watch = ClusterWatch(prometheus)
        self._last: ClusterSnapshot | None = None

    def poll(self) -> ClusterSnapshot:
        where = " ".join([self._prometheus.url, *(f"{label}={value}" for label, value in self._prometheus.limits.items())])
        try:
            if self._last is None:
                self._prometheus.require_series()
            self._last = ClusterSnapshot(where, self._watch.poll())
        except UserError as error:
            if self._last is None:
                raise
            return ClusterSnapshot(where, self._last.cluster, error.cause)
        return self._last

    def close(self) -> None:
        self._prometheus.close()


def _print(console: Console, watching: Polled, interval: float) -> None:
    if watching.has_rates:
        watching.poll()
        time.sleep(interval)
    console.print(watching.poll())


def _follow(console: Console, watching: Polled, interval: float) -> None:
    """Redraws more often than it polls, so that the screen follows a resized terminal."""
    with Live(watching.poll(), console=console, screen=True, refresh_per_second=4, vertical_overflow="crop") as live:
        while True:
            time.sleep(interval)
            live.update(watching.poll(), refresh=True)
