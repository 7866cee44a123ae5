"""`strata top --prometheus`: a cluster from a real Prometheus, and errors from a stand-in."""

import io
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import typer
import yaml
from rich.console import Console
from support import ROOT
from typer.testing import CliRunner, Result

from strata.monitoring import gpu_commands
from strata.monitoring.prometheus import server
from strata.monitoring.top import cluster as clusters
from strata.monitoring.top.cluster import Alert, Cluster, ClusterWatch, Gpus, Node, Team
from strata.monitoring.top.cluster_screen import ClusterSnapshot, dollars, watts
from strata.monitoring.top.command import ClusterWatching
from strata.monitoring.top.endpoint import Absent, Endpoint
from strata.monitoring.top.prometheus import Prometheus, quoted, select
from strata.platform import metrics, ports, processes
from strata.platform.errors import UserError

from .test_top_endpoint import serving
from .test_top_screen import RUN, SERVED

A = 'cluster="nodes",namespace="a",ray_io_cluster="ra"'
B = 'cluster="nodes",namespace="b",ray_io_cluster="rb"'
STEP_S, PAST_S = 15, 900


def past(now: int) -> str:
    """Fifteen minutes of two teams: recorded series, a run of team a, and an endpoint of team b."""
    constant = {
        f'strata:node_gpus:count{{{A},node="n1"}}': 8,
        f'strata:node_gpus:count{{{A},node="n2"}}': 8,
        f'strata:node_gpus:count{{{B},node="n3"}}': 4,
        f'strata:node_gpu_utilization:avg{{{A},node="n1"}}': 0.9,
        f'strata:node_gpu_utilization:avg{{{A},node="n2"}}': 0.1,
        f'strata:node_gpu_utilization:avg{{{B},node="n3"}}': 0.5,
        f'strata:node_gpu_memory_used:bytes{{{A},node="n1"}}': 30,
        f'strata:node_gpu_memory_used:bytes{{{A},node="n2"}}': 10,
        f'strata:node_gpu_memory_total:bytes{{{A},node="n1"}}': 40,
        f'strata:node_gpu_memory_total:bytes{{{A},node="n2"}}': 40,
        f'strata:node_gpu_power:watts{{{A},node="n1"}}': 5000,
        f'strata:node_gpu_temperature:max{{{A},node="n1"}}': 60,
        f'strata:node_gpu_temperature:max{{{A},node="n2"}}': 85,
        f'strata:gpus_throttled:count{{{A},reason="thermal"}}': 2,
        f'strata:gpus_throttled:count{{{A},reason="power"}}': 0,
        f'strata:team_gpus:count{{{A},name="H200"}}': 16,
        f'strata:team_gpus:count{{{B},name="H200"}}': 4,
        f'strata:team_gpus_idle:count{{{A},name="H200"}}': 6,
        f'strata:team_gpus_idle:count{{{B},name="H200"}}': 0,
        f'strata:team_cost:dollars_per_hour{{{A},name="H200"}}': 60.8,
        f'strata:team_idle_cost:dollars_per_hour{{{A},name="H200"}}': 22.8,
        f'strata:team_idle_cost:dollars_per_hour{{{B},name="H200"}}': 0,
        f'strata:team_idle_cost_dollars:sum5m{{{A},name="H200"}}': 1.9,
        f'ray_strata_train_steps_planned{{{A},run="long"}}': 10_000,
        f'ray_strata_train_steps_planned{{{A},run="done"}}': 100,
        f'ray_strata_train_step{{{A},run="done"}}': 100,
        f'ray_strata_train_steps_planned{{{A},run="stuck"}}': 100,
        f'ray_strata_train_step{{{A},run="stuck"}}': 40,
        f'ray_strata_train_tokens_per_second{{{A},run="long"}}': 1234,
        f'ray_strata_train_mfu{{{A},run="long"}}': 0.4,
        f'ray_strata_train_checkpoint_timestamp_seconds{{{A},run="long"}}': now - 600,
        f'ALERTS{{{A},alertname="Slow",alertstate="firing",severity="warning"}}': 1,
        f'ALERTS{{{A},alertname="Lost",alertstate="firing",severity="critical"}}': 1,
        f'ALERTS{{{A},alertname="Later",alertstate="pending",severity="critical"}}': 1,
        f'strata_serve_replicas{{{B},model="m",role="gateway",replica="g"}}': 1,
        f'strata_serve_replicas{{{B},model="m",role="decode",replica="d"}}': 1,
        f'strata_serve_kv_cache_usage{{{B},model="m",role="decode",replica="d"}}': 0.25,
        f'strata_serve_requests_in_flight{{{B},model="m",role="gateway",replica="g"}}': 3,
    }
    counters = {  # per second
        f'strata_serve_requests_total{{{B},model="m",role="gateway",replica="g",route="/v1/completions",status="200"}}': 4,
        f'strata_serve_requests_total{{{B},model="m",role="gateway",replica="g",route="/v1/completions",status="503"}}': 1,
        f'strata_serve_requests_total{{{B},model="m",role="gateway",replica="g",route="/metrics",status="200"}}': 9,
        f'strata_serve_generated_tokens_total{{{B},model="m",role="gateway",replica="g"}}': 100,
        f'strata_serve_first_token_seconds_bucket{{{B},model="m",role="gateway",replica="g",le="0.1"}}': 2,
        f'strata_serve_first_token_seconds_bucket{{{B},model="m",role="gateway",replica="g",le="0.2"}}': 4,
        f'strata_serve_first_token_seconds_bucket{{{B},model="m",role="gateway",replica="g",le="+Inf"}}': 4,
        f'ray_strata_train_step{{{A},run="long"}}': 1,
    }
    times = range(now - PAST_S, now + STEP_S, STEP_S)
    lines = [f"{name} {value} {at}" for name, value in constant.items() for at in times]
    lines += [f"{name} {rate * (at - now + PAST_S)} {at}" for name, rate in counters.items() for at in times]
    lines += [f'ray_strata_train_loss{{{A},run="long"}} {5 - (at - now + PAST_S) / PAST_S} {at}' for at in times]
    return "\n".join([*lines, "# EOF\n"])


@contextmanager
def stored(folder: Path, text: str) -> Iterator[str]:
    """A real Prometheus that has only this past."""
    try:
        prometheus, promtool = server.binary("prometheus"), server.binary("promtool")
    except UserError as error:
        pytest.skip(str(error))
    (folder / "past.om").write_text(text)
    importing = [promtool, "tsdb", "create-blocks-from", "openmetrics", str(folder / "past.om"), str(folder / "data")]
    subprocess.run(importing, check=True, capture_output=True)
    (folder / "empty.yml").write_text("{}")
    with ports.reserve() as held:
        where = [f"--config.file={folder / 'empty.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        with processes.started([prometheus, *where, f"--web.listen-address=127.0.0.1:{held.port}"], folder / "log"):
            deadline = time.monotonic() + 30
            while not server.Server(held.url).is_ready():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield held.url


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stored(tmp_path_factory.mktemp("prometheus"), past(int(time.time()))) as url:
        yield url


def polled(url: str, cluster: str | None = None, namespace: str | None = None) -> Cluster:
    prometheus = Prometheus(url, cluster, namespace)
    try:
        prometheus.require_series()
        return ClusterWatch(prometheus).poll()
    finally:
        prometheus.close()


def test_gpus_by_node(url: str) -> None:
    gpus = polled(url).gpus
    assert gpus is not None
    assert (gpus.count, gpus.nodes, gpus.idle, gpus.power) == (20, 3, 6, 5000)
    assert gpus.utilization == pytest.approx((8 * 0.9 + 8 * 0.1 + 4 * 0.5) / 20), "weighted by GPUs"
    assert gpus.memory == 0.5 and gpus.throttled == {"thermal": 2}
    assert [node.name for node in gpus.least_busy] == ["n2", "n3", "n1"]
    assert gpus.least_busy[0] == Node("n2", 8, 0.1, 0.25, None, 85)
    assert [node.name for node in gpus.hottest] == ["n2", "n1"]


def test_teams_with_the_cost_of_idle_gpus(url: str) -> None:
    first, second = polled(url).teams
    assert (first.name, first.gpus, first.idle, first.dollars_per_hour, first.idle_dollars_per_hour) == ("a", 16, 6, 60.8, 22.8)
    assert first.idle_dollars_of_a_day == pytest.approx(3 * 1.9, abs=1.91), "15 minutes are three or four windows"
    assert (second.name, second.gpus, second.idle_dollars_per_hour, second.idle_dollars_of_a_day) == ("b", 4, 0, 0)


def test_runs_with_steps_left(url: str) -> None:
    long, stuck = polled(url).runs
    assert (long.name, long.steps, long.tokens_per_s, long.mfu, long.silent_for) == ("long", 10_000, 1234, 0.4, 0)
    assert PAST_S - 3 * STEP_S <= long.step <= PAST_S
    assert long.seconds_left == pytest.approx(10_000 - long.step, rel=0.01), "a step a second"
    assert long.checkpoint_age == pytest.approx(600, abs=60)
    assert len(long.losses) >= 10 and long.losses[0] > long.losses[-1]
    assert (stuck.name, stuck.step, stuck.seconds_left, stuck.silent_for) == ("stuck", 40, None, 300)


def test_the_endpoint(url: str) -> None:
    endpoint = polled(url).endpoint
    assert isinstance(endpoint, Endpoint) and endpoint.recently is not None
    assert [(one.role, one.kv_usage) for one in endpoint.replicas] == [("decode", 0.25), ("gateway", None)]
    assert (endpoint.models, endpoint.in_flight) == (("m",), 3)
    assert endpoint.recently.requests_per_s == pytest.approx(5, rel=0.2), "without scrapes"
    assert endpoint.recently.errors == pytest.approx(120, rel=0.2)
    assert endpoint.recently.tokens_per_s == pytest.approx(100, rel=0.2)
    assert endpoint.recently.first_token is not None and endpoint.recently.inter_token is None
    assert endpoint.recently.first_token.p50 == pytest.approx(0.1)


def test_firing_alerts_the_worst_first(url: str) -> None:
    assert [(alert.severity, alert.name) for alert in polled(url).alerts] == [("critical", "Lost"), ("warning", "Slow")]


def test_one_cluster_or_one_team(url: str) -> None:
    other = polled(url, cluster="rb")
    assert other.gpus is not None and other.gpus.count == 4 and not other.runs
    assert [team.name for team in other.teams] == ["b"]
    own = polled(url, namespace="a")
    assert isinstance(own.endpoint, Absent) and [run.name for run in own.runs] == ["long", "stuck"]


def test_an_unknown_cluster_or_team(url: str) -> None:
    with pytest.raises(UserError, match=r'no series with ray_io_cluster="rc"[^\n]*\nRay clusters: ra, rb\. Namespaces: a, b'):
        polled(url, cluster="rc")
    with pytest.raises(UserError, match='ray_io_cluster="ra" and namespace="b"'):
        polled(url, cluster="ra", namespace="b")


def test_the_command_prints_once(url: str) -> None:
    answer = run_top("--prometheus", f"{url}/", "--once")
    assert answer.exit_code == 0, answer.output
    assert "20 GPUs" in answer.output and "$22.80/h" in answer.output and "Lost" in answer.output and "long" in answer.output


def run_top(*words: str) -> Result:
    app = typer.Typer()
    app.command()(gpu_commands.top)
    return CliRunner().invoke(app, list(words))


def test_options_without_a_server() -> None:
    for words in (("--cluster", "x"), ("--namespace", "x")):
        error = run_top(*words, "--once").exception
        assert isinstance(error, UserError) and "--prometheus URL" in error.fix


# Errors


@pytest.mark.parametrize("address", ["127.0.0.1:9090", "", "http://", "ftp://here"])
def test_invalid_address(address: str) -> None:
    with pytest.raises(UserError, match=r"not the address of a server[\s\S]*--prometheus http"):
        Prometheus(address, None, None)


def test_unreachable() -> None:
    with ports.reserve() as held, pytest.raises(UserError, match=r"does not answer: [\s\S]*port-forward"):
        polled(held.url)


@pytest.mark.parametrize(
    ("status", "body", "cause"),
    [
        (200, "<html>", "is not a Prometheus: /api/v1/query returned status 200"),
        (404, "not found", "is not a Prometheus: /api/v1/query returned status 404"),
        (200, "[]", "is not a Prometheus"),
        (403, "{}", "refuses the query with status 403"),
        (401, "login", "refuses the query with status 401"),
        (503, '{"status": "error", "error": "query timed out"}', "failed: query timed out"),
        (200, '{"status": "success", "data": {"result": []}}', "has no series of Strata"),
    ],
)
def test_servers_that_cannot_answer(status: int, body: str, cause: str) -> None:
    with serving(body, status=status) as port, pytest.raises(UserError, match=re.escape(cause)):
        polled(f"http://127.0.0.1:{port}")


def test_later_failures_leave_the_last_values(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus = Prometheus(url, None, None)
    watching = ClusterWatching(prometheus)
    first = watching.poll()
    assert not first.trouble

    def fail(_: str) -> None:
        raise UserError("It went away.", "Wait.")

    monkeypatch.setattr(prometheus, "query", fail)
    second = watching.poll()
    assert second.trouble == "It went away." and second.cluster == first.cluster
    monkeypatch.undo()
    assert not watching.poll().trouble
    watching.close()


@pytest.mark.parametrize(
    ("selector", "limits", "expected"),
    [
        ("up", {}, "up"),
        ("up", {"a": "b"}, 'up{a="b"}'),
        ('up{x="y"}', {"a": "b", "c": "d"}, 'up{x="y", a="b", c="d"}'),
        ("up", {"a": 'b"\\'}, 'up{a="b\\"\\\\"}'),
    ],
)
def test_selectors(selector: str, limits: dict[str, str], expected: str) -> None:
    assert select(selector, limits) == expected


def test_a_quoted_string_has_no_line_break() -> None:
    assert quoted("a\nb") == '"a\\nb"'


def test_recorded_series_have_rules() -> None:
    files = (ROOT / "infra" / "prometheus" / "rules").glob("*.yaml")
    rules = [rule for file in files for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]
    assert set(clusters.RECORDED) <= {rule.get("record") for rule in rules}
    assert metrics.TRAIN_STEP.exported == "ray_strata_train_step"


# Screen

NODE = Node("n1", 8, 0.25, 0.5, 5600, 85)
GPUS = Gpus(16384, 2048, 0.9, 0.5, 9.83e6, 1638.4, {"thermal": 3}, (NODE,), (replace(NODE, name="n2", temperature=None),))
TEAMS = tuple(Team(f"team-{number}", 100, number, 380, 3.8 * number, 1000 + number) for number in range(12))
ALERTS = tuple(Alert("StrataGpuXidError", "critical", {"node": f"n{number}", "job": "x"}) for number in range(7))


def shown(cluster: Cluster, trouble: str = "", width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    lines = console.render_lines(ClusterSnapshot("http://p", cluster, trouble), console.options.update(width=width), pad=False)
    return "\n".join("".join(segment.text for segment in line).rstrip() for line in lines)


def row(text: str, word: str) -> str:
    [found] = [line for line in text.splitlines() if word in line]
    return " ".join(found.split())


def test_the_screen() -> None:
    text = shown(Cluster(GPUS, TEAMS, (RUN,), SERVED, ALERTS))
    assert row(text, "16,384 GPUs").endswith("90% busy, 2,048 nodes") and row(text, "1,638 GPUs").endswith("10% 1,638 GPUs")
    assert row(text, "9.83 MW").startswith("memory")
    assert row(text, "throttled") == "throttled thermal 3"
    assert row(text, "n1 ").endswith("25% memory 50% 5.6 kW 85 °C") and row(text, "n2 ").endswith("5.6 kW -")
    assert row(text, "team-3") == "team-3 100 3 $380/h $11.40/h $1,003"
    assert "team-10" not in text and "and 2 more teams" in text
    assert "laptop-3" in text and "TTFT" in text
    assert text.count("StrataGpuXidError") == 5 and "node=n4" in text and "job=x" not in text and "in all 7 critical" in text


def test_a_cluster_without_anything() -> None:
    text = shown(Cluster(None, (), (), Absent("no series of a gateway"), ()), "It went away.")
    assert "not updated: It went away." in text and "no GPU series" in text and "no run is training" in text
    assert "no endpoint: no series of a gateway" in text and "no alert fires" in text and "Teams" not in text


def test_gpus_of_no_team() -> None:
    assert row(shown(Cluster(None, (Team("", 5, 5, 10, 10, 240),), (), SERVED, ())), "(no team)").endswith(
        "5 5 $10.00/h $10.00/h $240"
    )


@pytest.mark.parametrize("width", [40, 72, 110, 200])
def test_lines_fit_the_terminal_width(width: int) -> None:
    text = shown(Cluster(GPUS, TEAMS, (RUN,), SERVED, ALERTS), width=width)
    assert max(len(line) for line in text.splitlines()) <= width


def test_many_engines_are_cut_to_the_fullest() -> None:
    engine = SERVED.replicas[0]
    engines = tuple(replace(engine, name=f"decode-{number}", kv_usage=number / 100) for number in range(40))
    text = shown(Cluster(None, (), (), replace(SERVED, replicas=engines), ()))
    assert "decode-39" in text and "decode-24" in text and "decode-23" not in text and "the 16 fullest of 40 engines" in text


@pytest.mark.parametrize(("amount", "text"), [(0, "$0.00"), (99.994, "$99.99"), (100, "$100"), (12345.6, "$12,346")])
def test_dollars(amount: float, text: str) -> None:
    assert dollars(amount) == text


@pytest.mark.parametrize(
    ("power", "text"), [(None, "-"), (999, "999 W"), (1000, "1.0 kW"), (999_900, "999.9 kW"), (9.83e6, "9.83 MW")]
)
def test_watts(power: float | None, text: str) -> None:
    assert watts(power) == text
