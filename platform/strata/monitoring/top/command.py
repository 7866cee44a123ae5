"""`strata top`: polls machine, runs and endpoint, and redraws the screen."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from strata.monitoring.gpu.exporter import node_name
from strata.monitoring.gpu.nvml import Cards
from strata.monitoring.top import machine
from strata.monitoring.top.endpoint import EndpointWatch
from strata.monitoring.top.runs import RunWatch
from strata.monitoring.top.screen import Snapshot


def watch(url: str, once: bool, interval: float) -> None:
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # restores the terminal as Ctrl-C does
    try:
        with _watching(url) as watching:
            if once or not console.is_terminal:
                _print(console, watching, interval)
            else:
                _follow(console, watching, interval)
    except KeyboardInterrupt:
        return


class Watching:
    """Polls machine, runs and endpoint. Loads and rates are differences between two polls, so the first poll has none."""

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


@contextmanager
def _watching(url: str) -> Iterator[Watching]:
    watching = Watching(url)
    try:
        yield watching
    finally:
        watching.close()


def _print(console: Console, watching: Watching, interval: float) -> None:
    watching.poll()
    time.sleep(interval)
    console.print(watching.poll())


def _follow(console: Console, watching: Watching, interval: float) -> None:
    """Redraws more often than it polls, so that the screen follows a resized terminal."""
    with Live(watching.poll(), console=console, screen=True, refresh_per_second=4, vertical_overflow="crop") as live:
        while True:
            time.sleep(interval)
            live.update(watching.poll(), refresh=True)
