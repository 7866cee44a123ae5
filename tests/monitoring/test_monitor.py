"""`strata monitor`: targets, errors, and a real Prometheus server that stops with the command."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from support import ROOT

from strata.monitoring import grafana
from strata.monitoring.gpu.exporter import node_name
from strata.monitoring.monitor import summary, watch
from strata.monitoring.prometheus import scrape
from strata.monitoring.prometheus import server as prometheus
from strata.platform import ports
from strata.platform.errors import UserError

# Shortened output of Ray's agent and of a gateway.
RAY = """\
ray_strata_train_loss{run="r",WorkerId="w1",Version="2.60.0",otel_scope_name="ray",otel_scope_version=""} 2.5
ray_strata_train_loss{run="r",WorkerId="w2",Version="2.60.0",otel_scope_name="ray",otel_scope_version=""} 2.5
ray_grpc_server_req_process_time_ms_bucket{Method="ReportMetrics",le="1.0"} 7
"""
ENDPOINT = """\
strata_serve_replicas{model="m",role="decode",replica="d1"} 1
vllm:num_requests_running{engine="0"} 0
"""


@contextmanager
def serving(text: str) -> Iterator[int]:
    """HTTP server with a fixed /metrics response."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def session(folder: Path, pid: int, port: int) -> Path:
    made = folder / f"session_2026-01-01_00-00-00_000000_{pid}"
    made.mkdir(parents=True)
    (made / "metrics_export_port_29cf603d").write_text(str(port))
    return made


def test_running_ray_clusters_are_found(tmp_path: Path) -> None:
    assert json.loads(scrape.ray_targets(tmp_path / "absent")) == []
    dead = subprocess.Popen(["true"])
    dead.wait()
    session(tmp_path, dead.pid, 1001)
    stranger = session(tmp_path, os.getpid(), 1002)  # its process exited, and this process reuses the PID
    os.utime(stranger, (1, 1))
    assert json.loads(scrape.ray_targets(tmp_path)) == []
    os.utime(stranger)
    (tmp_path / "session_latest").symlink_to(stranger)
    session(tmp_path, os.getppid(), 1003)
    [found] = json.loads(scrape.ray_targets(tmp_path))
    assert found["targets"] == ["127.0.0.1:1002", "127.0.0.1:1003"]
    assert found["labels"] == {"cluster": "local", "ray_io_cluster": "local", "node": node_name()}


def test_endpoints_are_scraped_by_their_scheme(tmp_path: Path) -> None:
    config = scrape.laptop(tmp_path, 9090, ["http://127.0.0.1:8000", "http://10.0.0.1:8000/", "https://models.example"], 9835)
    targets = {
        job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"] if "static_configs" in job
    }
    assert targets["strata-endpoint-http"] == ["127.0.0.1:8000", "10.0.0.1:8000"]
    assert targets["strata-endpoint-https"] == ["models.example:443"]
    assert targets["prometheus"] == ["127.0.0.1:9090"]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x:1", "http://", "http://x:8000/v1"])
def test_invalid_endpoint_is_rejected(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="http://HOST:PORT"):
        scrape.laptop(tmp_path, 9090, [url], 9835)


def test_port_in_use_and_invalid_retention_are_rejected() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"in use(.|\n)*--port="):
            watch(taken.getsockname()[1], 0, [], "15d")
    with ports.reserve() as held, pytest.raises(UserError, match="--retention 15d"):
        watch(held.port, 0, [], "15")


def test_missing_prometheus_names_make_setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match="make setup"):
        prometheus.binary("prometheus")
    assert grafana.find() is None


def test_grafana_provisioning_files(tmp_path: Path) -> None:
    folder = grafana.write_files(tmp_path, "http://127.0.0.1:9090")
    [source] = yaml.safe_load((folder / "datasources" / "strata.yaml").read_text())["datasources"]
    assert (source["uid"], source["url"], source["type"]) == ("strata-prometheus", "http://127.0.0.1:9090", "prometheus")
    [provider] = yaml.safe_load((folder / "dashboards" / "strata.yaml").read_text())["providers"]
    boards = sorted(Path(provider["options"]["path"]).glob("*.json"))
    assert boards and all(json.loads(board.read_text())["uid"] for board in boards)


def test_grafana_on_path_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake Grafana serves the health check and writes its settings to a file."""
    program = tmp_path / "bin" / "grafana"
    program.parent.mkdir()
    (tmp_path / "public").mkdir()
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, os, pathlib, sys\n"
        "from http.server import HTTPServer, SimpleHTTPRequestHandler as Handler\n"
        "pathlib.Path(os.environ['GF_PATHS_DATA'] + '.json').write_text(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
        "os.chdir(os.environ['GF_PATHS_PROVISIONING'])\n"
        "pathlib.Path('api').mkdir(exist_ok=True); pathlib.Path('api/health').write_text('{}')\n"
        "HTTPServer((os.environ['GF_SERVER_HTTP_ADDR'], int(os.environ['GF_SERVER_HTTP_PORT'])), Handler).serve_forever()\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    command = grafana.find()
    assert command == [str(program), "server"]
    with (
        ports.reserve() as held,
        grafana.running(command, tmp_path / "home", held.port, "http://127.0.0.1:9090") as url,
    ):
        arguments, environment = json.loads((tmp_path / "home" / "data.json").read_text())
        assert arguments == ["server", "--homepath", str(tmp_path)]
        assert environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1" and environment["GF_PATHS_PROVISIONING"].startswith(
            str(tmp_path)
        )
        assert httpx.get(f"{url}/api/health").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_summary() -> None:
    health = prometheus.Health(
        waiting=0, up=3, down=["strata-endpoint-http at 127.0.0.1:8000"], series=300, rules=47, firing=["A"]
    )
    assert summary(health) == (
        "3 targets up (down: strata-endpoint-http at 127.0.0.1:8000), 300 series, 47 rules, 1 alerts firing"
    )


# Runs the command in a separate process, with Ray sessions in a folder of the test.
MONITOR = """
import sys
from pathlib import Path
from strata.monitoring.commands import monitor
from strata.platform.ray_cluster import local_ray
local_ray.TEMP_DIR = Path(sys.argv[1])
monitor(port=int(sys.argv[2]), url=sys.argv[3:])
"""


class Monitor:
    def __init__(self, home: Path, ray: Path, *endpoints: str) -> None:
        self.held = ports.reserve()
        self.port = self.held.port
        self.output = home / f"monitor-{self.port}.out"
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MONITOR, str(ray), str(self.port), *endpoints],
                env=os.environ | {"STRATA_HOME": str(home)},
                stdout=stream,
                stderr=stream,
            )

    def wait_until_ready(self) -> None:
        self.wait_until(prometheus.Server(f"http://127.0.0.1:{self.port}").is_ready)

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not true():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def query_api(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(f"http://127.0.0.1:{self.port}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]


@pytest.mark.slow
def test_real_prometheus_scrapes_stores_and_exits(tmp_path: Path) -> None:
    try:
        prometheus.binary("prometheus")
    except UserError as error:
        pytest.skip(str(error))
    ray = tmp_path / "ray"
    with serving(RAY) as ray_port, serving(ENDPOINT) as endpoint_port, ports.reserve() as unused:
        session(ray, os.getpid(), ray_port)
        first = Monitor(tmp_path, ray, f"http://127.0.0.1:{endpoint_port}", unused.url)
        try:
            first.wait_until_ready()
            first.wait_until(lambda: "targets up" in first.output.read_text())
            _check_what_it_scraped(first)
            [child] = psutil.Process(first.process.pid).children()
        finally:
            first.process.kill()  # no clean shutdown: Prometheus must exit by itself
            first.process.wait()
        psutil.wait_procs([child], timeout=20)
        assert not child.is_running()

        second = Monitor(tmp_path, ray)
        try:
            second.wait_until_ready()
            stored = second.query_api("query", query="last_over_time(strata_serve_replicas[1h])")["result"]
            assert [series["metric"]["replica"] for series in stored] == ["d1"]
            second.process.send_signal(signal.SIGINT)
            assert second.process.wait(timeout=30) == 0, second.output.read_text()
        finally:
            second.process.kill()
    assert "The next start uses the same data" in second.output.read_text()
    assert ports.is_free(second.port)


def _check_what_it_scraped(monitor: Monitor) -> None:
    targets = {target["labels"]["job"]: target["health"] for target in monitor.query_api("targets")["activeTargets"]}
    assert set(targets) == {"strata-ray", "strata-endpoint-http", "strata-gpu", "prometheus"}
    assert targets["strata-ray"] == targets["strata-gpu"] == "up"
    assert "4 targets up (down: strata-endpoint-http at" in monitor.output.read_text()
    losses = [series["metric"] for series in monitor.query_api("query", query="ray_strata_train_loss")["result"]]
    assert sorted(loss["WorkerId"] for loss in losses) == ["w1", "w2"]
    assert set(losses[0]) == {"__name__", "run", "WorkerId", "cluster", "ray_io_cluster", "node", "job", "instance"}
    names = monitor.query_api("label/__name__/values")
    assert "strata_serve_replicas" in names and "strata_gpu_devices" in names
    assert not [name for name in names if name.startswith(("ray_grpc", "vllm"))]
    rules = [rule for group in monitor.query_api("rules")["groups"] for rule in group["rules"]]
    files = (ROOT / "infra" / "prometheus" / "rules").glob("*.yaml")
    assert len(rules) == sum(len(group["rules"]) for file in files for group in yaml.safe_load(file.read_text())["groups"])
    assert not [rule["lastError"] for rule in rules if rule.get("lastError")]
