"""The GPUs of one machine as Prometheus series, for where NVIDIA's DCGM exporter is absent.

Without a GPU it still answers, with `strata_gpu_devices 0`: a scrape target that is down would look like a broken machine.
"""

import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from rich.console import Console

from strata.monitoring.gpu.nvml import THROTTLES, Cards, Gpu, Reading
from strata.monitoring.gpu.xid import XidCounts
from strata.platform import metrics
from strata.platform.errors import UserError
from strata.platform.metrics import OwnMetric

DCGM_PORT = 9400

Say = Callable[[str], None]
Family = CounterMetricFamily | GaugeMetricFamily


def serve(host: str, port: int) -> None:
    """Until Ctrl-C or SIGTERM."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    # Noted, not raised: raised in a finalizer, where exceptions are swallowed, a signal would be lost. In a list, not an Event,
    # whose lock the wait below may hold when the handler comes.
    interrupts: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background commands deaf to Ctrl-C
        signal.signal(number, lambda number, _: interrupts.append(number))
    with running(host, port, console.print) as bound:
        console.print(f"GPU metrics at http://{host}:{bound}/metrics")
        if dcgm_answers():
            console.print(f"A DCGM exporter answers on port {DCGM_PORT}: rules take its series where both have them.")
        while not interrupts:
            time.sleep(0.5)


@contextmanager
def running(host: str, port: int, say: Say, cards: Cards | None = None) -> Iterator[int]:
    """Serves in threads of its own until the end of the block; gives the port, which with 0 is any that is free."""
    cards = cards or Cards()
    exporter = Exporter(node_name(), cards, say)
    registry = CollectorRegistry()  # its own: the default one has series about this very process
    registry.register(exporter)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        exporter.close()
        fix = f"Choose another port (--port), or end what listens on {port}: perhaps an exporter runs already."
        raise UserError(f"The GPU exporter cannot listen on {host}:{port}: {error.strerror or error}.", fix) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        exporter.close()


def node_name() -> str:
    """In a pod the host name is the pod's: Kubernetes hands the node's down as NODE_NAME."""
    return os.environ.get("NODE_NAME") or platform.node()


def dcgm_answers(port: int = DCGM_PORT) -> bool:
    import httpx

    try:
        return "DCGM_FI_" in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=1.0).text
    except httpx.HTTPError:
        return False


class Exporter(Collector):
    """Reads the cards at each scrape. What is wrong is said when it begins, and not at every scrape."""

    def __init__(self, node: str, cards: Cards, say: Say) -> None:
        self._node = node
        self._cards = cards
        self._say = say
        self._said: frozenset[str] = frozenset()
        self._xids: XidCounts | None = None
        self._lock = threading.Lock()  # two scrapes may come at once
        self._read()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            reading = self._read()
            xids = self._xids
        counts = {gpu.index: xids.of(gpu.index) for gpu in reading.gpus} if xids else {}
        yield from families(self._node, reading, counts)

    def close(self) -> None:
        if self._xids:
            self._xids.stop()
        self._cards.close()

    def _read(self) -> Reading:
        reading = self._cards.read()
        wrong = [f"GPU {lost.index} does not answer: {lost.reason}" for lost in reading.lost]
        if reading.problem:
            wrong.append(f"No NVIDIA GPU can be read here: {reading.problem}. Only {metrics.GPU_COUNT.name} 0 is given out.")
        for line in wrong:
            if line not in self._said:
                self._say(line)
        self._said = frozenset(wrong)
        if reading.problem and self._xids:  # the driver went
            self._xids.stop()
            self._xids = None
        if reading.gpus and not self._xids:  # at once, or when a driver has come
            self._xids = XidCounts(self._cards.library(), self._say)
        return reading


def families(node: str, reading: Reading, xids: dict[int, dict[int, int]]) -> Iterator[Metric]:
    """Every metric of `metrics.GPUS`, in their order; values that a card does not tell are left out."""
    made: dict[OwnMetric, Family] = {metric: _family(metric) for metric in metrics.GPUS}
    made[metrics.GPU_COUNT].add_metric((node,), len(reading.gpus))
    for gpu in reading.gpus:
        labels = (node, str(gpu.index), gpu.name)
        for metric, value in _gauges(gpu).items():
            if value is not None:
                made[metric].add_metric(labels, value)
        if gpu.throttles is not None:
            for reason in THROTTLES:
                made[metrics.GPU_THROTTLED].add_metric((*labels, reason), reason in gpu.throttles)
        for xid, count in sorted(xids.get(gpu.index, {}).items()):
            made[metrics.GPU_XID].add_metric((*labels, str(xid)), count)
        for process in gpu.processes:
            whose = (*labels, str(process.pid), process.actor)
            if process.memory is not None:
                made[metrics.GPU_PROCESS_MEMORY].add_metric(whose, process.memory)
            if process.utilization is not None:
                made[metrics.GPU_PROCESS_UTILIZATION].add_metric(whose, process.utilization)
    yield from made.values()


def _family(metric: OwnMetric) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=metric.labels)


def _gauges(gpu: Gpu) -> dict[OwnMetric, float | None]:
    return {
        metrics.GPU_UTILIZATION: gpu.utilization,
        metrics.GPU_MEMORY_USED: gpu.memory_used,
        metrics.GPU_MEMORY_TOTAL: gpu.memory_total,
        metrics.GPU_POWER: gpu.power,
        metrics.GPU_POWER_LIMIT: gpu.power_limit,
        metrics.GPU_TEMPERATURE: gpu.temperature,
        metrics.GPU_SM_CLOCK: gpu.sm_clock,
        metrics.GPU_SM_CLOCK_MAX: gpu.sm_clock_max,
    }
