"""Polls the endpoint's `/metrics` under load and sums up the increases of its counters.

A counter restarts at zero with its process, so the difference of two readings would be wrong after a kill. Increases are summed
from one reading to the next, as Prometheus does. Counts after the last reading of a process are lost with it.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from strata.platform.metrics import SERVE_MIGRATIONS, SERVE_PREFILLS, SERVE_REPLICAS, SERVE_RETRIES, ServeMetric

PERIOD_S = 0.5
READ = (SERVE_RETRIES, SERVE_MIGRATIONS, SERVE_PREFILLS, SERVE_REPLICAS)

Series = tuple[str, tuple[tuple[str, str], ...]]  # name and sorted labels


def parse(text: str) -> dict[Series, float]:
    """Samples of the metrics in READ. Parsing all of the thousands of series would delay the clients in this process."""
    names = tuple(metric.name for metric in READ)
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(names))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
    }


def by(values: Mapping[Series, float], metric: ServeMetric, *labels: str) -> dict[str, float]:
    """Sums by the given labels, whose values are the key."""
    sums: dict[str, float] = {}
    for (name, pairs), value in values.items():
        if name == metric.name:
            key = " ".join(dict(pairs)[label] for label in labels)
            sums[key] = sums.get(key, 0.0) + value
    return sums


@dataclass
class Meter:
    """Counter `increases` since the first reading, and `values` of the latest, at time `at`."""

    http: httpx.AsyncClient
    at: float = 0.0
    values: dict[Series, float] = field(default_factory=dict)
    increases: dict[Series, float] = field(default_factory=dict)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)  # readings out of order would look like counter resets
    _known: dict[Series, float] = field(
        default_factory=dict
    )  # latest value of each series; a replica may be missing from a reading

    async def read(self) -> bool:
        """Reads once. Returns False if no gateway answered."""
        async with self._reading:
            try:
                response = (await self.http.get("/metrics")).raise_for_status()
            except httpx.HTTPError:
                return False
            self.take(parse(response.text), time.monotonic())
            return True

    def take(self, values: dict[Series, float], at: float) -> None:
        if self.at:
            for series, value in values.items():
                before = self._known.get(series, 0.0)
                grown = value - before if value >= before else value  # a lower value means a restart from zero
                self.increases[series] = self.increases.get(series, 0.0) + grown
        self.at, self.values = at, values
        self._known |= values

    async def watch(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(PERIOD_S)
