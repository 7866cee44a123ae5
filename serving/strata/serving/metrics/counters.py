"""What the endpoint says of itself in `/metrics`, read again and again while it is under load.

A counter starts anew with its process, so differences of two readings would be wrong after a kill: increases are summed up
from one reading to the next, as Prometheus does. What a process counted after its last reading is lost with it.
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

Series = tuple[str, tuple[tuple[str, str], ...]]  # a name, and its labels in order


def parse(text: str) -> dict[Series, float]:
    """Of what is READ alone: an endpoint has thousands of series, and parsing them all would hold up the clients here."""
    names = tuple(metric.name for metric in READ)
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(names))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
    }


def by(values: Mapping[Series, float], metric: ServeMetric, *labels: str) -> dict[str, float]:
    """Summed up over all labels but these, whose values are the key."""
    sums: dict[str, float] = {}
    for (name, pairs), value in values.items():
        if name == metric.name:
            key = " ".join(dict(pairs)[label] for label in labels)
            sums[key] = sums.get(key, 0.0) + value
    return sums


@dataclass
class Meter:
    """`increases` since the first reading; `values` as they were `at` the latest."""

    http: httpx.AsyncClient
    at: float = 0.0
    values: dict[Series, float] = field(default_factory=dict)
    increases: dict[Series, float] = field(default_factory=dict)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)  # readings out of order would look like a counter that fell
    _known: dict[Series, float] = field(default_factory=dict)  # of any reading: a replica may be missing from one

    async def read(self) -> bool:
        """Whether there was anything to read: between two gateways nobody answers."""
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
                grown = value - before if value >= before else value  # one that fell began anew from zero
                self.increases[series] = self.increases.get(series, 0.0) + grown
        self.at, self.values = at, values
        self._known |= values

    async def watch(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(PERIOD_S)
