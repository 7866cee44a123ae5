"""Exact figures and both sides of each limit of `strata top`, the GPU readings and the scrape configuration."""

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from rich.bar import Bar
from rich.console import Console

from strata.monitoring import monitor
from strata.monitoring.gpu.health import Health
from strata.monitoring.gpu.nvml import Cards, Gpu, GpuProcess, Reading
from strata.monitoring.prometheus import scrape, server
from strata.monitoring.top import endpoint, machine, parts, screen
from strata.monitoring.top import runs as top_runs
from strata.monitoring.top.endpoint import Absent, Endpoint, EndpointWatch, quantile
from strata.monitoring.top.machine import Cores
from strata.monitoring.top.runs import History, Progress, RunWatch, in_progress, last_checkpoint, seconds_per_step
from strata.platform.errors import UserError
from strata.platform.runs import Run, State

from .nvml_stand_in import Nvml, recorded

INF = math.inf


# Quantiles


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        # 4 observations up to 1, 6 in (1, 3], 10 in (3, 7].
        ({1.0: 4.0, 3.0: 10.0, 7.0: 20.0, INF: 20.0}, 0.1, 0.5),  # rank 2: half of the first bucket
        ({1.0: 4.0, 3.0: 10.0, 7.0: 20.0, INF: 20.0}, 0.2, 1.0),  # rank 4: its end
        ({1.0: 4.0, 3.0: 10.0, 7.0: 20.0, INF: 20.0}, 0.35, 2.0),  # rank 7: 3 of 6 in the second
        ({1.0: 4.0, 3.0: 10.0, 7.0: 20.0, INF: 20.0}, 0.75, 5.0),  # rank 15: 5 of 10 in the third
        ({1.0: 4.0, 3.0: 10.0, 7.0: 20.0, INF: 20.0}, 1.0, 7.0),
        ({1.0: 4.0, 3.0: 10.0, INF: 20.0}, 0.5, 3.0),
        ({1.0: 4.0, 3.0: 10.0, INF: 20.0}, 0.51, 3.0),  # beyond the highest finite bound
        ({3.0: 10.0, 1.0: 4.0, INF: 20.0}, 0.35, 2.0),  # in any order
        ({1.0: 0.0, 3.0: 10.0, INF: 10.0}, 0.0, 1.0),  # an empty bucket
        ({INF: 5.0}, 0.5, None),
        ({1.0: 5.0}, 0.5, None),  # no bucket for all
        ({1.0: 0.0, INF: 0.0}, 0.5, None),
        ({}, 0.5, None),
    ],
)
def test_quantiles_are_linear_within_a_bucket(buckets: dict[float, float], share: float, expected: float | None) -> None:
    found = quantile(buckets, share)
    assert found == (None if expected is None else pytest.approx(expected))


def labels(**pairs: str) -> endpoint.Labels:
    return frozenset(pairs.items())


def test_increases_of_counters_and_buckets_only() -> None:
    a, b = labels(replica="a"), labels(replica="b")
    before = {("x_total", a): 5.0, ("y_bucket", a): 7.0, ("gauge", a): 1.0}
    after = {("x_total", a): 5.0, ("y_bucket", a): 4.0, ("gauge", a): 9.0, ("z_total", a): 3.0, ("x_total", b): 8.0}
    assert endpoint.increase(before, after) == {
        ("x_total", a): 0.0,
        ("y_bucket", a): 4.0,  # it fell: a restarted process
        ("z_total", a): 3.0,  # a new series of a known replica
        ("x_total", b): 0.0,  # a new replica
    }


def test_latencies_and_errors_over_the_window() -> None:
    def buckets(name: str, *counts: float) -> dict[tuple[str, endpoint.Labels], float]:
        return {
            (f"strata_serve_{name}_seconds_bucket", labels(le=le, replica="g")): count
            for le, count in zip(("1.0", "2.0", "+Inf"), counts, strict=True)
        }

    def answers(status: str, count: float, route: str = "/v1/completions") -> dict[tuple[str, endpoint.Labels], float]:
        return {("strata_serve_requests_total", labels(status=status, route=route, replica="g")): count}

    grown = buckets("first_token", 50, 100, 100) | buckets("inter_token", 0, 100, 100)
    grown |= answers("200", 10) | answers("499", 3) | answers("500", 2) | answers("503", 4) | answers("500", 9, "/metrics")
    recently = endpoint.summarize({}, [(3.0, grown), (2.0, answers("200", 1))]).recently
    assert recently and recently.first_token and recently.inter_token
    assert (recently.seconds, recently.requests_per_s, recently.errors) == (5.0, 4.0, 6.0)
    assert (recently.first_token.p50, recently.first_token.p99) == (1.0, pytest.approx(1.98))
    assert (recently.inter_token.p50, recently.inter_token.p99) == (1.5, pytest.approx(1.99))


def test_polls_older_than_ten_seconds_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, now = EndpointWatch("http://127.0.0.1:1/"), SimpleNamespace(s=0.0)
    text = 'strata_serve_replicas{model="m",role="decode",replica="d"} 1\n'
    monkeypatch.setattr(watch._client, "get", lambda _: httpx.Response(200, text=text, request=httpx.Request("GET", "http://x")))
    monkeypatch.setattr(time, "monotonic", lambda: now.s)
    seconds = []
    for length in (4, 4, 4, 4, 12, 1):
        found = watch.poll()
        assert isinstance(found, Endpoint)
        seconds.append(found.recently.seconds if found.recently else None)
        now.s += length
    # A poll is dropped once the others cover 10 s: 4, 4+4, 4+4+4, then 4+4+4 again, then 12 alone.
    assert seconds == [None, 4, 8, 12, 12, 12]
    monkeypatch.setattr(watch._client, "get", lambda _: httpx.Response(503, request=httpx.Request("GET", "http://x")))
    assert watch.poll() == Absent("http://127.0.0.1:1/metrics returned status 503")
    watch.close()


@pytest.mark.parametrize(("message", "reason"), [("refused", "refused"), ("", "ConnectError")])
def test_the_reason_of_an_absent_endpoint(monkeypatch: pytest.MonkeyPatch, message: str, reason: str) -> None:
    def fail(_: str) -> None:
        raise httpx.ConnectError(message)

    watch = EndpointWatch("http://127.0.0.1:1")
    monkeypatch.setattr(watch._client, "get", fail)
    assert watch.poll() == Absent(reason)
    watch.close()


# Runs


@pytest.mark.parametrize(
    ("recent", "expected"),
    [
        ([(1, 10.0), (3, 20.0)], 5.0),
        ([(1, 10.0), (2, 11.0), (5, 30.0)], 5.0),
        ([(1, 10.0)], None),
        ([(3, 10.0), (3, 20.0)], None),
        ([(4, 10.0), (3, 20.0)], None),
        ([(1, 20.0), (3, 10.0)], 0.0),  # the clock was set back
    ],
)
def test_mean_time_of_a_step(recent: list[tuple[int, float]], expected: float | None) -> None:
    assert seconds_per_step(recent) == expected


def running(path: Path) -> Run:
    path.mkdir(parents=True)
    return Run(path)


@pytest.mark.parametrize(("age", "shown"), [(119.0, True), (120.0, False), (121.0, False)])
def test_a_run_elsewhere_is_shown_while_its_metrics_are_two_minutes_fresh(tmp_path: Path, age: float, shown: bool) -> None:
    run = running(tmp_path / "mine")
    run.metrics.touch()
    os.utime(run.metrics, (1000.0, 1000.0))
    assert in_progress(run, State("running", host="other-pod"), 1000.0 + age) is shown
    assert not in_progress(run, State("finished", host="other-pod"), 1000.0 + age)
    me = psutil.Process()
    assert in_progress(run, State("running", pid=me.pid, pid_created=me.create_time()), 1000.0 + age)


def test_progress_of_a_run(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, me = running(own_home / "runs" / "mine"), psutil.Process()
    run.write_state(State("running", 3, 100, pid=me.pid, pid_created=me.create_time()))
    start = me.create_time()
    times = {40: start - 900, 41: start + 2, 42: start + 4, 43: start + 10}
    lines = [{"step": step, "loss": step / 10, "time": at, "tokens_per_s": 7.0 + step} for step, at in times.items()]
    lines[2] |= {"val_loss": 1.5, "checkpoint_stall_s": 0.1}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + "[1]\n" + '{"step": 44, "loss": null}\n')
    monkeypatch.setattr(time, "time", lambda: start + 25)
    assert RunWatch().poll() == [
        # 41 to 43 took 8 s, and 57 steps remain. The checkpoint of step 42 is 21 s old, the last step 15 s.
        Progress(
            "mine", 43, 100, (4.0, 4.1, 4.2, 4.3), (1.5,), 50.0, None, pytest.approx(228.0), pytest.approx(21), pytest.approx(15)
        )
    ]
    run.write_state(State("running", 3, 40, pid=me.pid, pid_created=me.create_time()))
    monkeypatch.setattr(time, "time", lambda: start)
    [late] = RunWatch().poll()
    assert (late.seconds_left, late.silent_for, late.checkpoint_age) == (0.0, 0.0, 0.0), "never negative"


def test_the_pace_is_that_of_the_last_fifty_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0, "time": 0.0}) + "\n" for step in range(60)))
    history = History(path)
    history.read_on()
    assert [step for step, _ in history.recent] == list(range(10, 60)) and len(history.losses) == 60
    history.read_on()
    assert len(history.losses) == 60


def test_the_newest_manifest_is_the_last_checkpoint(tmp_path: Path) -> None:
    run = running(tmp_path / "mine")
    history = History(run.metrics)
    assert last_checkpoint(run, history) is None
    history.saved_at = 5.0
    assert last_checkpoint(run, history) == 5.0
    for step, written in ((1, 20.0), (2, 30.0), (3, 10.0)):
        manifest = run.checkpoints / f"step-{step}" / "manifest-0.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
        os.utime(manifest, (written, written))
    assert last_checkpoint(run, history) == 30.0


@pytest.mark.parametrize(
    ("line", "valid"),
    [
        (b'{"step": 1, "loss": 2.0, "time": 3}', True),
        (b'{"step": 1, "loss": 2.0}', False),
        (b'{"step": "1", "loss": 2.0, "time": 3}', False),
        (b'{"step": 1, "loss": null, "time": 3}', False),
        (b"[1, 2, 3]", False),
        (b"{", False),
    ],
)
def test_damaged_records_are_skipped(line: bytes, valid: bool) -> None:
    assert (top_runs._record(line) is not None) is valid


# Screen


def text_of(renderable: Any, width: int = 120) -> list[str]:
    console = Console(width=width, force_terminal=True, color_system=None, legacy_windows=False)
    lines = console.render_lines(renderable, console.options.update(width=width), pad=False)
    return [" ".join("".join(segment.text for segment in line).split()) for line in lines]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (3599, "60 min"),
        (3600, "1.0 h"),
        (5400, "1.5 h"),
        (35999, "10.0 h"),
        (36000, "10 h"),
        (86399, "24 h"),
        (86400, "1.0 d"),
        (863999, "10.0 d"),
        (864000, "10 d"),
    ],
)
def test_durations_at_their_limits(seconds: float, text: str) -> None:
    assert screen.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 ms"), (0.0999, "99.9 ms"), (0.1, "100 ms"), (0.999, "999 ms"), (1.0, "1.00 s"), (61.5, "61.50 s")],
)
def test_latencies_at_their_limits(seconds: float, text: str) -> None:
    assert screen.milliseconds(seconds) == text


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([0, 1, 2, 3], 2, "▁█"),  # means 0.5 and 2.5
        ([0, 2, 4, 8, 8, 8], 3, "▁▆█"),  # means 1, 6 and 8: 5/7 of the height is the sixth block
        ([0, 2, 4, 8, 8], 3, "▁▄█"),  # parts of 1, 2 and 2 values: means 0, 3 and 8
        ([1, 2, 3], 3, "▁▅█"),
        ([math.nan, math.nan, 1, 3], 2, " ▁"),
        ([math.nan, 1, 3, 3], 2, "▁█"),
        ([-INF, 1, 2], 3, " ▁█"),
    ],
)
def test_sparklines_are_means(values: list[float], width: int, expected: str) -> None:
    assert screen.sparkline(values, width) == expected


@pytest.mark.parametrize(
    ("share", "block"), [(-1, "▁"), (0, "▁"), (0.124, "▁"), (0.125, "▂"), (0.5, "▅"), (0.874, "▇"), (0.875, "█"), (1, "█")]
)
def test_levels_have_eight_steps(share: float, block: str) -> None:
    assert screen.levels([share]) == block


@pytest.mark.parametrize(
    ("share", "colour"), [(0.0, "green"), (0.79, "green"), (0.8, "yellow"), (0.94, "yellow"), (0.95, "red"), (1.5, "red")]
)
def test_bars_are_red_when_full(share: float, colour: str) -> None:
    bar = parts.bar(share, 8)
    assert isinstance(bar, Bar) and bar.style.color and bar.style.color.name == colour
    assert (bar.begin, bar.end, bar.size, bar.width) == (0.0, min(1.0, share), 1.0, 8)
    assert parts.bar(None, 8) == parts.bar(share, 0) == ""
    assert parts.bar(share, 8, "cyan").style.color.name == "cyan"  # type: ignore[union-attr]


GIB = 2**30


def gpu(**changes: Any) -> Gpu:
    values: dict[str, Any] = {
        "index": 3,
        "uuid": "u",
        "name": "NVIDIA H200",
        "utilization": 0.5,
        "memory_used": 30 * GIB,
        "memory_total": 120 * GIB,
        "power": 300.4,
        "power_limit": 700.0,
        "temperature": 60.6,
        "sm_clock": 1e9,
        "sm_clock_max": 2e9,
        "throttles": frozenset({"thermal", "power"}),
        "health": Health({}, {}, {}, {}),
        "processes": (),
    }
    return Gpu(**(values | changes))


def snapshot(*gpus: Gpu, cores: Cores | None = None) -> screen.Snapshot:
    cores = cores or Cores((0.2, 0.6), 6 * GIB, 8 * GIB)
    return screen.Snapshot("here", Reading(gpus), cores, (), "http://x", Absent("refused"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "3 H200 50% 30.0/120.0 GiB 300/700 W 61 °C power, thermal"),
        ({"power_limit": None, "throttles": frozenset()}, "3 H200 50% 30.0/120.0 GiB 300 W 61 °C"),
        ({"power": None, "temperature": None, "throttles": None}, "3 H200 50% 30.0/120.0 GiB - -"),
        ({"memory_used": 0, "utilization": 0.0, "throttles": None}, "3 H200 0% 0.0/120.0 GiB 300/700 W 61 °C"),
        ({"memory_total": 0, "throttles": None}, "3 H200 50% 30.0/0.0 GiB 300/700 W 61 °C"),
    ],
)
def test_the_line_of_a_gpu(changes: dict[str, Any], expected: str) -> None:
    assert text_of(snapshot(gpu(**changes)), width=71)[1] == expected


def test_processes_with_the_most_memory_come_first() -> None:
    processes = (GpuProcess(1, "a", None, None), GpuProcess(2, "b", GIB, 0.25), GpuProcess(3, "c", 3 * GIB, 0.5))
    lines = text_of(snapshot(gpu(processes=processes)), width=71)
    assert lines[2:6] == ["processes", "3 3 c 3.0 GiB 50%", "3 2 b 1.0 GiB 25%", "3 1 a - -"]
    assert "processes" not in text_of(snapshot(gpu()), width=71)


def test_the_mean_load_and_the_used_memory() -> None:
    lines = text_of(snapshot(cores=Cores((0.2, 0.6, 0.1), 6 * GIB, 8 * GIB)), width=71)
    assert lines[1:3] == ["3 cores 30% ▂▅▁", "memory 25% 6.0 of 8.0 GiB free"]


@pytest.mark.parametrize(("width", "blocks"), [(71, 0), (72, 8), (109, 8), (110, 20)])
def test_the_width_of_bars_follows_the_terminal(width: int, blocks: int) -> None:
    console = Console(width=width, force_terminal=True, color_system=None, legacy_windows=False)
    [_, line, *_] = console.render_lines(
        snapshot(gpu(utilization=1.0, memory_used=0, power=None, throttles=None)), console.options.update(width=width)
    )
    assert "".join(segment.text for segment in line).count("█") == blocks


@pytest.mark.parametrize(("silent", "marked"), [(59.9, False), (60.0, True)])
def test_a_run_without_a_step_for_a_minute_is_marked(silent: float, marked: bool) -> None:
    run = Progress("r", 10, 100, (), (), None, None, None, None, silent)
    assert ("no step for 1 min" in screen._pace(run).plain) is marked


def test_the_pace_of_a_run() -> None:
    run = Progress("r", 10, 100, (), (), 1234.5, 0.456, 90.0, 7200.0, 1.0)
    assert screen._pace(run).plain == "10/100  1,234 tokens/s  MFU 46%  2 min left  saved 2.0 h ago"
    first = Progress("r", 0, 0, (3.0,), (), None, None, None, None, 1.0)
    assert text_of(screen.run_table([first], 0)) == ["r 0/0", "loss 3.000 ▁"]


def test_what_was_refused() -> None:
    def refused(rejections: dict[str, float], errors: float) -> tuple[str, bool]:
        recently = endpoint.Recently(1.0, None, None, 0.0, 0.0, 0.0, {}, rejections, errors)
        text = screen._refused(recently)
        return text.plain, bool(text.style)

    assert refused({"b": 2.0, "a": 3.0, "c": 0.0}, 0.0) == ("5 rejected (a 3, b 2)  0 failed", True)
    assert refused({"c": 0.0}, 4.0) == ("0 rejected  4 failed", True)
    assert refused({}, 0.0) == ("0 rejected  0 failed", False)


# Machine and GPUs


def test_the_load_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda percpu: [25.0, 100.0])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * GIB))
    monkeypatch.setattr(machine, "available_memory", lambda: 3 * GIB)
    assert machine.poll() == Cores((0.25, 1.0), 3 * GIB, 8 * GIB)


def test_samples_above_a_hundred_percent_are_invalid() -> None:
    values = recorded()[:1]
    values[0]["processes"] = [{"pid": pid, "memory": 1} for pid in (7, 8, 9)]
    values[0]["process_samples"] = [
        {"pid": 7, "sm_percent": 100, "after": 5},
        {"pid": 7, "sm_percent": 30, "after": 4},
        {"pid": 8, "sm_percent": 101, "after": 5},
    ]
    [card] = Cards(Nvml(values), str).read().gpus
    assert [(each.pid, each.utilization) for each in card.processes] == [(7, 1.0), (8, 0.0), (9, 0.0)]


def test_samples_of_the_last_second_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, since = Nvml(recorded()[:1]), []
    monkeypatch.setattr(time, "time", lambda: 100.0)
    monkeypatch.setattr(nvml, "nvmlDeviceGetProcessUtilization", lambda card, at: since.append(at) or [], raising=False)
    Cards(nvml, str).read()
    assert since == [99_000_000], "in microseconds"


# Scrape configuration


@pytest.mark.parametrize(
    ("url", "scheme", "address"),
    [
        ("http://h:8000", "http", "h:8000"),
        ("http://h:8000/", "http", "h:8000"),
        ("http://h", "http", "h:80"),
        ("https://h", "https", "h:443"),
    ],
)
def test_addresses_of_endpoints(url: str, scheme: str, address: str) -> None:
    assert scrape.Endpoint.parse(url) == scrape.Endpoint(scheme, address)


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h/v1", "://h"])
def test_addresses_that_are_not_endpoints(url: str) -> None:
    with pytest.raises(UserError, match="is not the address of an endpoint"):
        scrape.Endpoint.parse(url)


def test_the_local_configuration() -> None:
    config = scrape.laptop(Path("/m"), 9090, ["http://a:1", "https://b:2", "http://c:3"], 9835)
    assert config["global"] == {"scrape_interval": "5s", "scrape_timeout": "4s", "evaluation_interval": "15s"}
    assert config["rule_files"] == ["/m/rules/*.yaml"]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert list(jobs) == ["strata-ray", "strata-endpoint-http", "strata-endpoint-https", "strata-gpu", "prometheus"]
    targets = {name: job["static_configs"][0]["targets"] for name, job in jobs.items() if "static_configs" in job}
    assert targets == {
        "strata-endpoint-http": ["a:1", "c:3"],
        "strata-endpoint-https": ["b:2"],
        "strata-gpu": ["127.0.0.1:9835"],
        "prometheus": ["127.0.0.1:9090"],
    }
    assert jobs["strata-ray"]["file_sd_configs"] == [{"files": ["/m/targets/ray.json"], "refresh_interval": "5s"}]
    assert jobs["strata-ray"]["metric_relabel_configs"][1] == {"regex": "otel_scope_.*|Version", "action": "labeldrop"}
    without = scrape.laptop(Path("/m"), 9090, [], 9835)
    assert [job["job_name"] for job in without["scrape_configs"]] == ["strata-ray", "strata-gpu", "prometheus"]
    assert scrape.GPU_EXPORTER_PORT == 9835


def test_agents_of_live_sessions_are_scraped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = psutil.Process()
    monkeypatch.setenv("NODE_NAME", "n")

    def session(name: str, *files: tuple[str, str], modified: float = me.create_time() + 5) -> None:
        folder = tmp_path / name
        folder.mkdir()
        for file, text in files:
            (folder / file).write_text(text)
        os.utime(folder, (modified, modified))

    port = ("metrics_export_port_1", "7001")
    assert scrape.ray_targets(tmp_path) == "[]"
    session(f"session_2026_{me.pid}", port, ("other", "1"))
    session(f"session_2025_{me.pid}", ("metrics_export_port_1", "7002"), modified=me.create_time() - 5)  # a reused PID
    session(f"session_2024_{2**22 - 1}", ("metrics_export_port_1", "7003"))  # ended
    session(f"session_2023_{me.pid}", ("metrics_export_port_1", "70"), ("metrics_export_port_2", ""))  # being written
    session("session_latest", port)
    [target] = json.loads(scrape.ray_targets(tmp_path))
    assert target == {"targets": ["127.0.0.1:7001"], "labels": {"cluster": "local", "ray_io_cluster": "local", "node": "n"}}


# Prometheus


def test_health_counts_targets_rules_and_alerts(monkeypatch: pytest.MonkeyPatch) -> None:
    def target(health: str, instance: str) -> dict[str, Any]:
        return {"health": health, "labels": {"job": "j", "instance": instance}}

    answers: dict[str, Any] = {
        "targets?state=active": {
            "activeTargets": [target("up", "a"), target("up", "b"), target("down", "c"), target("unknown", "d")]
        },
        "rules": {"groups": [{"rules": [1, 2]}, {"rules": [3]}]},
        "alerts": {
            "alerts": [
                {"state": state, "labels": {"alertname": name}}
                for state, name in (("firing", "B"), ("pending", "C"), ("firing", "A"), ("firing", "B"))
            ]
        },
        "status/tsdb": {"headStats": {"numSeries": "77"}},
    }
    monkeypatch.setattr(server.Server, "_get", lambda _, path: answers[path])
    health = server.Server("http://x").health()
    assert health == server.Health(waiting=1, up=2, down=["j at c"], series=77, rules=3, firing=["A", "B"])
    assert monitor.summary(health) == "2 targets up (down: j at c), 77 series, 3 rules, 2 alerts firing"


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    assert server.last_line(tmp_path / "log") == "its log is empty"
    (tmp_path / "log").write_text("a\nb\n")
    assert server.last_line(tmp_path / "log") == "b"


def test_ray_targets_are_written_only_if_they_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = SimpleNamespace(text="[]")
    monkeypatch.setattr(scrape, "ray_targets", lambda _: targets.text)
    server.write_ray_targets(tmp_path)
    file = tmp_path / "targets" / "ray.json"
    before = file.stat().st_ino
    server.write_ray_targets(tmp_path)
    assert file.stat().st_ino == before
    targets.text = "[1]"
    server.write_ray_targets(tmp_path)
    assert file.read_text() == "[1]"
