"""GPU exporter output as Prometheus scrapes it, with `nvml_stand_in.py` in place of NVML."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pynvml
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from strata.monitoring.gpu import exporter as gpu_exporter
from strata.monitoring.gpu import xid as gpu_xid
from strata.monitoring.gpu.nvml import Cards
from strata.platform import metrics, ports
from strata.platform.errors import UserError

from .nvml_stand_in import RECORDED, Nvml, exporter_text

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    listed = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    by_series = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in listed}
    assert len(by_series) == len(listed), "no series twice"
    return by_series


def value(text: str, name: str, **labels: str) -> float:
    [found] = [v for (n, pairs), v in samples(text).items() if n == name and labels.items() <= dict(pairs).items()]
    return found


@contextmanager
def scraping(nvml: Nvml, reported: list[str]) -> Iterator[Callable[[], str]]:
    """Yields a function that scrapes the exporter without HTTP."""
    exporter = gpu_exporter.Exporter("here", Cards(nvml), reported.append)
    try:
        yield lambda: generate_latest(exporter).decode()
    finally:
        exporter.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_xid, "WAIT_MS", 50)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_recorded_text_is_up_to_date() -> None:
    assert (RECORDED / "gpu_exporter.txt").read_text() == exporter_text(), "run: python tests/monitoring/nvml_stand_in.py"


def test_exporter_serves_exactly_the_defined_metrics_and_labels() -> None:
    families = {family.name: family for family in text_string_to_metric_families(exporter_text())}
    assert set(families) == {metric.exported.removesuffix("_total") for metric in metrics.GPUS}
    for metric in metrics.GPUS:
        family = families[metric.exported.removesuffix("_total")]
        assert family.type == metric.kind and family.samples
        assert all(set(sample.labels) == set(metric.labels) for sample in family.samples), metric.name


def test_dcgm_recording_has_dcgm_names_and_labels() -> None:
    families = {family.name: family for family in text_string_to_metric_families((RECORDED / "dcgm_exporter.txt").read_text())}
    for name in ("GPU_UTIL", "FB_USED", "FB_FREE", "GPU_TEMP", "POWER_USAGE", "SM_CLOCK", "XID_ERRORS"):
        gpus = families[f"DCGM_FI_DEV_{name}"].samples
        assert [sample.labels["gpu"] for sample in gpus] == ["0", "1"]
        assert {"UUID", "device", "modelName", "Hostname", "pod", "namespace", "container"} <= set(gpus[0].labels)


def test_unsupported_values_are_left_out() -> None:
    nvml = Nvml()
    nvml.broken |= {(1, "nvmlDeviceGetUtilizationRates"): pynvml.NVML_ERROR_NOT_SUPPORTED}
    nvml.broken |= {(1, "nvmlDeviceGetCurrentClocksThrottleReasons"): pynvml.NVML_ERROR_NOT_SUPPORTED}
    with scraping(nvml, []) as scrape:
        text = scrape()
    assert {dict(pairs)["gpu"] for name, pairs in samples(text) if name == "strata_gpu_utilization_ratio"} == {"0"}
    assert {dict(pairs)["gpu"] for name, pairs in samples(text) if name == "strata_gpu_throttled"} == {"0"}
    assert {dict(pairs)["gpu"] for name, pairs in samples(text) if name == "strata_gpu_power_watts"} == {"0", "1"}


def test_xid_errors_are_counted_from_zero() -> None:
    nvml, reported = Nvml(), list[str]()
    with scraping(nvml, reported) as scrape:

        def counted(gpu: str, xid: str) -> float:
            text = scrape()
            return value(text, "strata_gpu_xid_errors_total", gpu=gpu, xid=xid)

        assert (counted("0", "79"), counted("1", "79")) == (0, 0)
        nvml.report_xid(1, 79)
        nvml.report_xid(1, 79)
        nvml.report_xid(0, 154)
        wait_until(lambda: "GPU 0: XID 154" in reported)
        assert (counted("0", "79"), counted("1", "79"), counted("0", "154")) == (0, 2, 1)
    assert (nvml.opened, nvml.event_sets) == (0, 0), "NVML is shut down"
    assert all(thread.name != "xid" for thread in threading.enumerate())


def test_card_without_xid_support_has_no_xid_series() -> None:
    nvml, reported = Nvml(), list[str]()
    nvml.broken |= {(index, "nvmlDeviceRegisterEvents"): pynvml.NVML_ERROR_NOT_SUPPORTED for index in (0, 1)}
    with scraping(nvml, reported) as scrape:
        text = scrape()
    assert reported == ["GPUs 0, 1 do not report XID errors: Not Supported"]
    assert not [name for name, _ in samples(text) if name == "strata_gpu_xid_errors_total"]


def test_driver_without_event_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vGPU in a virtual machine has no event support."""
    nvml, reported = Nvml(), list[str]()

    def unsupported() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(nvml, "nvmlEventSetCreate", unsupported)
    with scraping(nvml, reported) as scrape:
        assert value(scrape(), "strata_gpu_devices") == value(scrape(), "strata_gpu_devices") == 2
    assert reported == ["XID errors cannot be counted: Not Supported"]
    assert nvml.opened == 0


def test_failing_event_waits_neither_spin_nor_stop_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, waits = Nvml(), list[float]()

    def lost(*_: object) -> None:
        waits.append(time.monotonic())
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(nvml, "nvmlEventSetWait", lost)
    xids = gpu_xid.XidCounts(nvml, print)
    time.sleep(0.175)
    xids.stop()
    assert 2 <= len(waits) <= 5


def test_lost_card_is_reported_once_per_loss() -> None:
    nvml, reported = Nvml(), list[str]()
    with scraping(nvml, reported) as scrape:

        def count() -> float:
            return value(scrape(), "strata_gpu_devices")

        assert count() == 2
        nvml.broken[1, "*"] = pynvml.NVML_ERROR_GPU_IS_LOST
        assert [count(), count(), count()] == [1, 1, 1]
        assert reported == ["GPU 1 does not respond: GPU is lost"]
        nvml.broken.clear()
        assert count() == 2
        nvml.broken[1, "*"] = pynvml.NVML_ERROR_GPU_IS_LOST
        count()
    assert reported == ["GPU 1 does not respond: GPU is lost"] * 2


def test_driver_loaded_later_is_picked_up() -> None:
    nvml, reported = Nvml(), list[str]()
    nvml.init_error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    with scraping(nvml, reported) as scrape:
        text = scrape()
        assert list(samples(text).values()) == [0], "only the GPU count"
        assert len(reported) == 1 and "Driver Not Loaded" in reported[0]
        nvml.init_error = None
        text = scrape()
        assert value(text, "strata_gpu_devices") == 2
        nvml.report_xid(0, 48)
        wait_until(lambda: "GPU 0: XID 48" in reported)
        nvml.cards.clear()
        text = scrape()
        assert list(samples(text).values()) == [0]
        assert len(reported) == 3 and nvml.event_sets == 0, "the event set is freed when the driver is unloaded"


def test_node_name_comes_from_kubernetes_if_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NODE_NAME", raising=False)
    assert gpu_exporter.node_name() == socket.gethostname()
    monkeypatch.setenv("NODE_NAME", "gpu-node-7")
    with gpu_exporter.running("127.0.0.1", 0, print, Cards(Nvml())) as port:
        assert value(httpx.get(f"http://127.0.0.1:{port}/metrics").text, "strata_gpu_devices", node="gpu-node-7") == 2


def test_port_in_use_raises_and_releases_nvml() -> None:
    nvml = Nvml()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{port}[\s\S]*--port"),
            gpu_exporter.running("127.0.0.1", port, print, Cards(nvml)),
        ):
            pass
    assert (nvml.opened, nvml.event_sets) == (0, 0)


def test_dcgm_is_detected_by_its_series() -> None:
    class Answer(BaseHTTPRequestHandler):
        text = (RECORDED / "dcgm_exporter.txt").read_bytes()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.text)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert gpu_exporter.dcgm_answers(server.server_port)
        Answer.text = b"node_load1 0.5\n"
        assert not gpu_exporter.dcgm_answers(server.server_port)
        server.shutdown()
    assert not gpu_exporter.dcgm_answers(server.server_port)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_prints_once_and_exits_on_signal(number: signal.Signals) -> None:
    with ports.reserve() as held:
        program = f"from strata.monitoring.gpu_commands import gpu_exporter; gpu_exporter(port={held.port}, host='127.0.0.1')"
        process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=os.environ)
        try:
            url = f"{held.url}/metrics"
            first, second = first_answer(url, process), httpx.get(url).text
            assert value(first, "strata_gpu_devices") == value(second, "strata_gpu_devices")
            process.send_signal(number)
            _, written = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert f"GPU metrics at {url}" in written and "Traceback" not in written
    assert written.count("No NVIDIA GPU") == (value(first, "strata_gpu_devices") == 0)


def first_answer(url: str, process: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.TransportError):
            return httpx.get(url).raise_for_status().text
        time.sleep(0.05)
    raise AssertionError(f"No response from {url}.")
