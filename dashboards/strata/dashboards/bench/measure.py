"""Runs Prometheus on the series of a fleet, and times every query of every board as Grafana sends it."""

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from strata.dashboards import boards, queries
from strata.dashboards.bench import history, targets
from strata.dashboards.bench.fleet import HOUR_S, SCRAPE_S, Fleet
from strata.dashboards.board import VARIABLES
from strata.monitoring.prometheus import manifests, server
from strata.platform import ports, processes
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic

CORES = 2
ROUNDS = 3
POINTS = 900  # of a panel of half the width, on a screen of 1,920 pixels
QUERY_TIMEOUT_S = 60.0
# Series for long-term storage, as in docs/monitoring.md: aggregates, runs, endpoints and alerts, but no series per GPU.
REMOTE_WRITE = (
    "strata:(node|team|gpus|serve|train)_.*|strata:gpu_(utilization|temperature|price):.*"
    "|ray_strata_train_.*|strata_serve_.*|ALERTS"
)
PER_RANK = "ray_strata_train_rank_seconds"
Answer = tuple[int, int]  # series, samples read
Running = tuple[httpx.Client, psutil.Process]
UNITS = {"m": 60, "h": HOUR_S, "d": 24 * HOUR_S}


@dataclass(frozen=True)
class Timing:
    board: str
    panel: str
    seconds: float  # the slowest of several rounds
    cpu_seconds: float  # of Prometheus, the least of several rounds: scrapes and rules go on meanwhile
    series: int  # in the answer
    samples: int  # that Prometheus read for it


@dataclass(frozen=True)
class Measured:
    fleet: Fleet
    history_samples: int
    bytes_per_sample: float  # in the blocks on the disk
    series: int  # in the server's head, scraped and recorded
    scraped_series: int
    remote_write_series: int
    samples_per_second: float
    memory_bytes: int
    rule_seconds: dict[str, float]  # by group, of the last evaluation
    timings: tuple[Timing, ...]
    load: float  # of the machine when the queries began, over one minute

    def of(self, board: str) -> list[Timing]:
        return [timing for timing in self.timings if timing.board == board]


@dataclass(frozen=True)
class Settings:
    gpus: int
    live_s: float
    scrape_s: int = SCRAPE_S


def measure(settings: Settings, say: Callable[[str], None]) -> Measured:
    fleet = Fleet(settings.gpus)
    work = cache_dir() / "bench"
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work, prefix=".monitoring-") as name:
        folder = Path(name)
        data = folder / "data"
        say(f"writing the past of {len(fleet.nodes):,} nodes")
        samples = history.write(fleet, data, int(time.time()), say)
        size = sum(file.stat().st_size for file in data.rglob("*") if file.is_file())
        pages = targets.Pages(fleet)
        with targets.serving(pages) as port, _prometheus(folder, data, port, pages.paths, settings) as (client, process):
            say(f"scraping for {settings.live_s:.0f} s")
            scraped, rate = _scrape(client, settings.live_s)
            load = psutil.getloadavg()[0]
            say(f"{len(queries.every())} queries, {ROUNDS} times each")
            timings = tuple(_timings(client, process))
            counters = _metrics(client)
            return Measured(
                fleet=fleet,
                history_samples=samples,
                bytes_per_sample=size / samples,
                series=int(counters["prometheus_tsdb_head_series"]),
                scraped_series=scraped,
                remote_write_series=_count(client, f'{{__name__=~"{REMOTE_WRITE}", __name__!="{PER_RANK}"}}'),
                samples_per_second=rate,
                memory_bytes=int(counters["process_resident_memory_bytes"]),
                rule_seconds=_rules(client),
                timings=timings,
                load=load,
            )


@contextmanager
def _prometheus(folder: Path, data: Path, port: int, paths: tuple[str, ...], settings: Settings) -> Iterator[Running]:
    config = folder / "prometheus.yml"
    rules = folder / "rules.yaml"
    write_atomic(rules, yaml.safe_dump({"groups": [_scaled(group, settings.scrape_s) for group in manifests.groups()]}))
    write_atomic(config, yaml.safe_dump(configuration(port, paths, rules, settings.scrape_s)))
    with ports.reserve() as held:
        command = [
            server.binary("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={data}",
            "--storage.tsdb.retention.time=10d",
            f"--web.listen-address=127.0.0.1:{held.port}",
            "--log.level=warn",
        ]
        log = folder / "prometheus.log"
        with (
            processes.started(command, log, {**os.environ, "GOMAXPROCS": str(CORES)}) as process,
            httpx.Client(base_url=held.url, timeout=QUERY_TIMEOUT_S) as client,
        ):
            deadline = time.monotonic() + server.READY_S
            while not server.Server(held.url).is_ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise UserError(f"Prometheus did not start: {server.last_line(log)}", "Compare its log with this version.")
                time.sleep(0.1)
            yield client, psutil.Process(process.pid)


def _scaled(group: dict[str, Any], scrape_s: int) -> dict[str, Any]:
    """A rule group with its interval in proportion to the scrape's."""
    seconds = int(group["interval"].removesuffix("s"))
    return group | {"interval": f"{seconds * scrape_s // SCRAPE_S}s"}


def configuration(port: int, paths: tuple[str, ...], rules: Path, scrape_s: int) -> dict[str, Any]:
    """One target per page. Its own labels are dropped: the pages have those of nodes and pods."""
    groups = [{"targets": [f"127.0.0.1:{port}"], "labels": {"__metrics_path__": path, "page": path}} for path in paths]
    return {
        "global": {"scrape_interval": f"{scrape_s}s", "scrape_timeout": f"{scrape_s}s", "evaluation_interval": f"{scrape_s}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "fleet",
                "static_configs": groups,
                "metric_relabel_configs": [{"action": "labeldrop", "regex": "instance|job|page"}],
            }
        ],
    }


def _scrape(client: httpx.Client, seconds: float) -> tuple[int, float]:
    """Waits while Prometheus scrapes. Returns the number of scraped series, and samples per second with those of rules."""
    name = 'prometheus_tsdb_head_samples_appended_total{type="float"}'
    time.sleep(seconds / 4)  # the first scrapes create the series
    before, began = _metrics(client), time.monotonic()
    time.sleep(seconds * 3 / 4)
    after, took = _metrics(client), time.monotonic() - began
    name = name if name in after else "prometheus_tsdb_head_samples_appended_total"
    return _number(client, "sum(scrape_samples_post_metric_relabeling)"), (after[name] - before.get(name, 0.0)) / took


def _count(client: httpx.Client, selector: str) -> int:
    return _number(client, f"count({selector})")


def _number(client: httpx.Client, expr: str) -> int:
    found = _query(client, expr)["result"]
    return int(float(found[0]["value"][1])) if found else 0


def _metrics(client: httpx.Client) -> dict[str, float]:
    lines = (line for line in client.get("/metrics").text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def _rules(client: httpx.Client) -> dict[str, float]:
    groups = client.get("/api/v1/rules").json()["data"]["groups"]
    failed = [rule["name"] for group in groups for rule in group["rules"] if rule.get("lastError")]
    if failed:
        raise UserError(f"Recording rules failed: {', '.join(failed)}.", "Run the same expressions in Prometheus to see why.")
    return {group["name"]: float(group["evaluationTime"]) for group in groups}


def _query(client: httpx.Client, expr: str, **parameters: Any) -> Any:
    path = "/api/v1/query_range" if "step" in parameters else "/api/v1/query"
    answer = client.post(path, data={"query": expr, **parameters}).json()
    if answer["status"] != "success":
        raise UserError(f"Prometheus refused a query: {answer['error']}", f"The query is: {expr}")
    return answer["data"]


def _timings(client: httpx.Client, process: psutil.Process) -> Iterator[Timing]:
    for board in boards.every():
        seconds = range_seconds(board.since)
        step = step_seconds(seconds)
        for query in queries.of(board):
            expr = query.resolved(rate_interval=f"{max(4 * SCRAPE_S, step + SCRAPE_S)}s", time_range=f"{seconds}s")

            def ask(expr: str = expr, instant: bool = query.instant, seconds: int = seconds, step: int = step) -> Answer:
                now = time.time()
                span = {"time": now} if instant else {"start": now - seconds, "end": now, "step": step}
                data = _query(client, expr, stats="all", **span)
                return len(data["result"]), int(data["stats"]["samples"]["totalQueryableSamples"])

            yield _timed(process, board.uid, query.panel, ask)
    for name, definition in VARIABLES.items():

        def list_values(name: str = name, definition: str = definition) -> Answer:
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", definition)
            assert found is not None, name
            selector = re.sub(r"\$\w+", ".*", found[1])
            now = time.time()
            parameters: dict[str, str | float] = {"match[]": selector, "start": now - HOUR_S, "end": now}
            return len(client.get(f"/api/v1/label/{found[2]}/values", params=parameters).json()["data"]), 0

        yield _timed(process, "variables", name, list_values)


def _timed(process: psutil.Process, board: str, panel: str, ask: Callable[[], Answer]) -> Timing:
    took, used, answer = [], [], (0, 0)
    for _ in range(ROUNDS):
        began, cpu = time.monotonic(), process.cpu_times()
        answer = ask()
        took.append(time.monotonic() - began)
        after = process.cpu_times()
        used.append(after.user + after.system - cpu.user - cpu.system)
    return Timing(board, panel, max(took), max(0.0, min(used)), *answer)  # a difference of floats may be below zero


def range_seconds(since: str) -> int:
    """Seconds of a board's default range, such as `now-3h`."""
    found = re.fullmatch(r"now-(\d+)([mhd])", since)
    assert found is not None, since
    return int(found[1]) * UNITS[found[2]]


def step_seconds(seconds: int) -> int:
    """Step of a panel's query: its range over its points, at least a scrape interval and a multiple of it."""
    return max(SCRAPE_S, -(-seconds // POINTS // SCRAPE_S) * SCRAPE_S)


def median(timings: list[Timing]) -> float:
    return statistics.median(timing.seconds for timing in timings)
