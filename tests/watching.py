"""Prometheus for a test session, configured as by `strata monitor`, but with short intervals and recorded GPU metrics.

Recorded output of Strata's GPU exporter and of DCGM replaces real GPUs. The node name in the exporter's output is replaced by
this machine's, so that rules which join GPUs with Ray nodes match.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support import ROOT

from strata.monitoring.gpu.exporter import node_name
from strata.monitoring.prometheus import scrape
from strata.monitoring.prometheus import server as prometheus
from strata.platform import ports
from strata.platform.files import write_atomic
from strata.platform.ray_cluster import local_ray

RECORDED = ROOT / "tests" / "monitoring" / "recorded"
EVERY_S = 1  # scrape and rule evaluation interval, so that a run of a few seconds has several samples


@dataclass(frozen=True)
class Watch:
    client: httpx.Client
    folder: Path
    began: float
    stop: Callable[[], None]

    def query(self, what: str, **parameters: Any) -> Any:
        answer = self.client.get(f"/api/v1/{what}", params=parameters).json()
        assert answer["status"] == "success", f"{answer['error']}: {parameters}"
        return answer["data"]

    def history(self, expr: str) -> list[list[float]]:
        """Values of each series since the start, as a Grafana panel queries them, without NaN."""
        found = self.query("query_range", query=expr, start=self.began, end=time.time(), step=2 * EVERY_S)["result"]
        every = [[float(value) for _, value in one["values"] if value != "NaN"] for one in found]
        return [values for values in every if values]

    def wait_for(self, expr: str, limit_s: float = 60) -> None:
        deadline = time.monotonic() + limit_s
        while not self.history(expr):
            assert time.monotonic() < deadline, f"no result within {limit_s:.0f} s: {expr}"
            time.sleep(0.5)

    def names(self) -> set[str]:
        return set(self.query("label/__name__/values"))

    def scrape_endpoint(self, url: str) -> None:
        address = scrape.Endpoint.parse(url).address
        _targets(self.folder).write_text(json.dumps([{"targets": [address], "labels": {"cluster": scrape.LOCAL_CLUSTER}}]))


@contextmanager
def watching(folder: Path) -> Iterator[Watch]:
    """Runs until `stop` or the end of the block. Scrapes take time of the endpoint, which would affect tests of its speed."""
    own = (RECORDED / "gpu_exporter.txt").read_text().replace("gpu-node-1", node_name())
    laptop = scrape.laptop
    with ExitStack() as stack:
        gpu_port = stack.enter_context(_serving({"/metrics": own, "/dcgm": (RECORDED / "dcgm_exporter.txt").read_text()}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scrape, "ray_targets", lambda _: "[]")
            patch.setattr(scrape, "laptop", lambda *arguments: _shortened(laptop(*arguments), folder, gpu_port))
            held = stack.enter_context(ports.reserve())
            running = prometheus.running(folder, held.port, ["http://127.0.0.1:8000"], gpu_port, "1d")
            server = stack.enter_context(running)
        stack.enter_context(_following(folder))
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
        yield Watch(client, folder, time.time(), stack.close)


@contextmanager
def _following(folder: Path) -> Iterator[None]:
    """Updates the scrape targets as Ray clusters start and stop. Only clusters of this test session count."""
    stop = threading.Event()
    sessions, targets = folder / "sessions", folder / "targets" / "ray.json"
    sessions.mkdir()

    def follow() -> None:
        while not stop.wait(0.5):
            for session in local_ray.TEMP_DIR.glob("session_2*"):
                link = sessions / session.name
                if not link.exists() and _started_here(int(session.name.rpartition("_")[2])):
                    link.symlink_to(session)
            found = scrape.ray_targets(sessions)
            if targets.read_text() != found:
                write_atomic(targets, found)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _started_here(pid: int) -> bool:
    try:
        return os.getpid() in [parent.pid for parent in psutil.Process(pid).parents()]
    except psutil.NoSuchProcess:
        return False


def _targets(folder: Path) -> Path:
    return folder / "targets" / "endpoint.json"


def _shortened(config: dict[str, Any], folder: Path, gpu_port: int) -> dict[str, Any]:
    """Short intervals, and the endpoint's address in a target file, because each test chooses its port later."""
    config["global"] |= {f"{what}_interval": f"{EVERY_S}s" for what in ("scrape", "evaluation")}
    config["global"]["scrape_timeout"] = f"{EVERY_S}s"
    [endpoint] = [job for job in config["scrape_configs"] if job["job_name"] == "strata-endpoint-http"]
    del endpoint["static_configs"]
    endpoint["file_sd_configs"] = [{"files": [str(_targets(folder))], "refresh_interval": "1s"}]
    config["scrape_configs"].append(
        {
            "job_name": "dcgm",
            "metrics_path": "/dcgm",
            "static_configs": [{"targets": [f"127.0.0.1:{gpu_port}"], "labels": {"cluster": scrape.LOCAL_CLUSTER}}],
            "metric_relabel_configs": [
                {"source_labels": ["__name__"], "regex": scrape.whole(scrape.DCGM_SERIES), "action": "keep"}
            ],
        }
    )
    return config


@contextmanager
def _serving(pages: dict[str, str]) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(pages[self.path].encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
