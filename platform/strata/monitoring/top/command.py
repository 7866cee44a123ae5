"""`strata top`: the essentials of machine, runs and endpoint, live, for people without Grafana."""

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
from strata.monitoring.top.screen import Look


def watch(url: str, once: bool, interval: float) -> None:
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the terminal is given back as after Ctrl-C
    try:
        with _watching(url) as watching:
            if once or not console.is_terminal:
                _print(console, watching, interval)
            else:
                _follow(console, watching, interval)
    except KeyboardInterrupt:
        return


class Watching:
    """All that is looked at. Loads and rates are those between two looks, so the first look has none."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._cards = Cards()
        self._runs = RunWatch()
        self._endpoint = EndpointWatch(url)

    def look(self) -> Look:
        return Look(node_name(), self._cards.read(), machine.look(), self._runs.look(), self._url, self._endpoint.look())

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
    watching.look()
    time.sleep(interval)
    console.print(watching.look())


def _follow(console: Console, watching: Watching, interval: float) -> None:
    """The screen is drawn more often than it is looked at, so that it fits a terminal that was resized."""
    with Live(watching.look(), console=console, screen=True, refresh_per_second=4, vertical_overflow="crop") as live:
        while True:
            time.sleep(interval)
            live.update(watching.look(), refresh=True)
