"""Local Prometheus server: binaries, files, process and health."""

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from strata.monitoring.prometheus import runbooks, scrape
from strata.platform import processes
from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.ray_cluster import local_ray

READY_S = 60.0  # replaying a large database takes time


def binary(name: str) -> str:
    """Path of `prometheus` or `promtool`: beside the Python executable, where `make setup` installs them, or on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise UserError(
            f"The program '{name}' is not installed.",
            "Run 'make setup'. If that cannot download it (no apt), install Prometheus (your distribution's package, or "
            "prometheus.io/download) and put it on PATH.",
        )
    return found


def rules_dir() -> Path:
    """Folder of the rule files: inside this package in a wheel, `infra/prometheus/rules` in a checkout."""
    packaged = Path(__file__).parents[1] / "rules"
    return packaged if packaged.is_dir() else Path(__file__).parents[4] / "infra" / "prometheus" / "rules"


def write_files(folder: Path, port: int, endpoints: Sequence[str], gpu_port: int) -> Path:
    """Writes configuration, rules and targets; runs at each start and leaves the data. Returns the configuration's path."""
    config = folder / "prometheus.yml"
    write_atomic(config, yaml.safe_dump(scrape.laptop(folder, port, endpoints, gpu_port), sort_keys=False))
    shutil.rmtree(folder / "rules", ignore_errors=True)
    for rules in sorted(rules_dir().glob("*.yaml")):
        write_atomic(folder / "rules" / rules.name, runbooks.with_base(rules.read_text()))
    write_ray_targets(folder)
    return config


def write_ray_targets(folder: Path) -> None:
    """Updates the target file of Ray clusters, which Prometheus watches."""
    file, targets = folder / "targets" / "ray.json", scrape.ray_targets(local_ray.TEMP_DIR)
    if not file.exists() or file.read_text() != targets:
        write_atomic(file, targets)


@contextmanager
def running(folder: Path, port: int, endpoints: Sequence[str], gpu_port: int, retention: str) -> Iterator["Server"]:
    program = binary("prometheus")
    config = write_files(folder, port, endpoints, gpu_port)
    command = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--storage.tsdb.retention.time={retention}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
        *_pages(Path(program)),
    ]
    log = folder / "prometheus.log"
    with processes.started(command, log) as process:
        server = Server(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + READY_S
        while not server.is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"Prometheus did not start: {last_line(log)}", f"See {log}.")
            time.sleep(0.1)
        yield server


def _pages(program: Path) -> list[str]:
    """Option with the folder of the web UI, for Debian's build in another prefix. Other builds embed the UI."""
    folder = program.parents[1] / "share" / "prometheus" / "web"
    return [f"--web.local-assets={folder}"] if folder.is_dir() else []


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "its log is empty"


@dataclass(frozen=True)
class Health:
    waiting: int  # targets not scraped yet
    up: int
    down: list[str]  # jobs and addresses of targets that are down
    series: int
    rules: int
    firing: list[str]


@dataclass(frozen=True)
class Server:
    """Client of a Prometheus server's HTTP API."""

    url: str

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def health(self) -> Health:
        targets = self._get("targets?state=active")["activeTargets"]
        groups = self._get("rules")["groups"]
        alerts = self._get("alerts")["alerts"]
        return Health(
            waiting=sum(target["health"] == "unknown" for target in targets),
            up=sum(target["health"] == "up" for target in targets),
            down=[f"{t['labels']['job']} at {t['labels']['instance']}" for t in targets if t["health"] == "down"],
            series=int(self._get("status/tsdb")["headStats"]["numSeries"]),
            rules=sum(len(group["rules"]) for group in groups),
            firing=sorted({alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}),
        )

    def has_ui(self) -> bool:
        """False for Debian's build without its web packages, which serves the API only."""
        return httpx.get(self.url, timeout=5, follow_redirects=True).status_code == 200

    def _get(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", timeout=10)
        answer.raise_for_status()
        return answer.json()["data"]
