"""A Prometheus server on this machine: its programs, its files, its process, and what it says of itself."""

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

from strata.monitoring.prometheus import scrape
from strata.platform import processes
from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.ray_cluster import local_ray

READY_S = 60.0  # a large store is read again at the start


def binary(name: str) -> str:
    """`prometheus` or `promtool`: beside our own command, where set-up puts them, or on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise UserError(
            f"There is no program '{name}' on this machine.",
            "Run 'make setup'; where that cannot fetch it (no apt), install Prometheus (your distribution's package, or "
            "prometheus.io/download) and put it on PATH.",
        )
    return found


def rules_dir() -> Path:
    """In a wheel the rules lie inside this package; in a checkout where people look for them."""
    packaged = Path(__file__).parents[1] / "rules"
    return packaged if packaged.is_dir() else Path(__file__).parents[4] / "infra" / "prometheus" / "rules"


def write_files(folder: Path, port: int, endpoints: Sequence[str], gpu_port: int) -> Path:
    """Everything the server reads, anew at each start; its data stays. Returns the configuration's path."""
    config = folder / "prometheus.yml"
    write_atomic(config, yaml.safe_dump(scrape.laptop(folder, port, endpoints, gpu_port), sort_keys=False))
    shutil.rmtree(folder / "rules", ignore_errors=True)
    for rules in sorted(rules_dir().glob("*.yaml")):
        write_atomic(folder / "rules" / rules.name, rules.read_bytes())
    write_ray_targets(folder)
    return config


def write_ray_targets(folder: Path) -> None:
    """Prometheus watches the file: clusters come and go while it runs."""
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
                raise UserError(f"Prometheus did not start: {last_words(log)}", f"See {log}.")
            time.sleep(0.1)
        yield server


def _pages(program: Path) -> list[str]:
    """Debian's build looks for its pages in one folder of the system's, unless told; other builds have them inside."""
    folder = program.parents[1] / "share" / "prometheus" / "web"
    return [f"--web.local-assets={folder}"] if folder.is_dir() else []


def last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"


@dataclass(frozen=True)
class Health:
    waiting: int  # targets that were not scraped yet
    up: int
    down: list[str]  # the jobs and addresses of targets that do not answer
    series: int
    rules: int
    firing: list[str]


@dataclass(frozen=True)
class Server:
    """Asked over its HTTP API."""

    url: str

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def health(self) -> Health:
        targets = self._ask("targets?state=active")["activeTargets"]
        groups = self._ask("rules")["groups"]
        alerts = self._ask("alerts")["alerts"]
        return Health(
            waiting=sum(target["health"] == "unknown" for target in targets),
            up=sum(target["health"] == "up" for target in targets),
            down=[f"{t['labels']['job']} at {t['labels']['instance']}" for t in targets if t["health"] == "down"],
            series=int(self._ask("status/tsdb")["headStats"]["numSeries"]),
            rules=sum(len(group["rules"]) for group in groups),
            firing=sorted({alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}),
        )

    def has_ui(self) -> bool:
        """Debian's build without the packages of its pages answers questions, but shows nothing."""
        return httpx.get(self.url, timeout=5, follow_redirects=True).status_code == 200

    def _ask(self, what: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{what}", timeout=10)
        answer.raise_for_status()
        return answer.json()["data"]
