"""Prometheus exporter for the GPUs of one machine, for use without NVIDIA's DCGM exporter.

Without a GPU it serves `strata_gpu_devices 0`: a scrape target that is down would look like a broken machine.
"""

import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from rich.console import Console

from strata.monitoring.gpu.health import Health
from strata.monitoring.gpu.nvml import THROTTLES, Cards, Gpu, Reading
from strata.monitoring.gpu.xid import XidCounts
from strata.platform import metrics
from strata.platform.errors import UserError
from strata.platform.metrics import OwnMetric

DCGM_PORT = 9400

Report = Callable[[str], None]
Family = CounterMetricFamily | GaugeMetricFamily


def serve(host: str, port: int) -> None:
    """Serves `/metrics` until Ctrl-C or SIGTERM."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    # The handler records the signal instead of raising: an exception raised inside a finalizer is swallowed. It uses a list,
    # because a wait on an Event could hold the Event's lock when the handler runs.
    interrupts: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background commands with SIGINT ignored
        signal.signal(number, lambda number, _: interrupts.append(number))
    with running(host, port, console.print) as bound:
        console.print(f"GPU metrics at http://{host}:{bound}/metrics")
        if dcgm_answers():
            console.print(f"A DCGM exporter runs on port {DCGM_PORT}. Rules prefer its series to this exporter's.")
        while not interrupts:
            time.sleep(0.5)


@contextmanager
def running(host: str, port: int, report: Report, cards: Cards | None = None) -> Iterator[int]:
    """Serves from background threads while the context is open. Yields the bound port; port 0 binds any free port."""
    cards = cards or Cards()
    exporter = Exporter(node_name(), cards, report)
    registry = CollectorRegistry()  # the default registry also has series about this process
    registry.register(exporter)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        exporter.close()
        fix = f"Choose another port with --port, or stop the process that listens on {port}, perhaps another exporter."
        raise UserError(f"The GPU exporter cannot listen on {host}:{port}: {error.strerror or error}.", fix) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        exporter.close()


def node_name() -> str:
    """Returns NODE_NAME, which the pod spec sets because a pod's host name is its own, or else the host name."""
    return os.environ.get("NODE_NAME") or platform.node()


def dcgm_answers(port: int = DCGM_PORT) -> bool:
    import httpx

    try:
        return "DCGM_FI_" in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=1.0).text
    except httpx.HTTPError:
        return False


class Exporter(Collector):
    """Reads the GPUs at each scrape. Reports a problem when it first appears, not at every scrape."""

    def __init__(self, node: str, cards: Cards, report: Report) -> None:
        self._node = node
        self._cards = cards
        self._report = report
        self._reported: frozenset[str] = frozenset()
        self._xids: XidCounts | None = None
        self._lock = threading.Lock()  # scrapes may be concurrent
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
        wrong = [f"GPU {lost.index} does not respond: {lost.reason}" for lost in reading.lost]
        if reading.problem:
            wrong.append(f"No NVIDIA GPU can be read: {reading.problem}. The only series is {metrics.GPU_COUNT.name} 0.")
        for line in wrong:
            if line not in self._reported:
                self._report(line)
        self._reported = frozenset(wrong)
        if reading.problem and self._xids:  # the driver was unloaded
            self._xids.stop()
            self._xids = None
        if reading.gpus and not self._xids:  # at start, or once a driver is loaded
            self._xids = XidCounts(self._cards.library(), self._report)
        return reading


def families(node: str, reading: Reading, xids: dict[int, dict[int, int]]) -> Iterator[Metric]:
    """Every metric of `metrics.GPUS`, in that order. Values that a card does not report are left out."""
    made: dict[OwnMetric, Family] = {metric: _family(metric) for metric in metrics.GPUS}
    made[metrics.GPU_COUNT].add_metric((node,), len(reading.gpus))
    for gpu in reading.gpus:
        labels = (node, str(gpu.index), gpu.name)
        made[metrics.GPU_INFO].add_metric((*labels, gpu.uuid), 1)
        for metric, value in _gauges(gpu).items():
            if value is not None:
                made[metric].add_metric(labels, value)
        if gpu.throttles is not None:
            for reason in THROTTLES:
                made[metrics.GPU_THROTTLED].add_metric((*labels, reason), reason in gpu.throttles)
        for xid, count in sorted(xids.get(gpu.index, {}).items()):
            made[metrics.GPU_XID].add_metric((*labels, str(xid)), count)
        for metric, values in _errors(gpu.health).items():
            for kind, value in values.items():
                made[metric].add_metric((*labels, kind), value)
        for process in gpu.processes:
            process_labels = (*labels, str(process.pid), process.actor)
            if process.memory is not None:
                made[metrics.GPU_PROCESS_MEMORY].add_metric(process_labels, process.memory)
            if process.utilization is not None:
                made[metrics.GPU_PROCESS_UTILIZATION].add_metric(process_labels, process.utilization)
    yield from made.values()


def _family(metric: OwnMetric) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=metric.labels)


def _errors(health: Health) -> dict[OwnMetric, Mapping[str, float]]:
    return {
        metrics.GPU_ECC_ERRORS: health.ecc_errors,
        metrics.GPU_REMAPPED_ROWS: health.remapped_rows,
        metrics.GPU_ROW_REMAP: health.row_remap,
        metrics.GPU_NVLINK_ERRORS: health.nvlink_errors,
    }


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
