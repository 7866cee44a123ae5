"""Exact text of important queries, limits and converted alerts."""

from pathlib import Path
from typing import Any

import pytest

from strata.dashboards import alert_rules, panels, promql, queries, series, style
from strata.dashboards.board import Board, Row, even
from strata.dashboards.panels import Line
from strata.dashboards.style import Limits, Unit
from strata.platform import metrics

POD_FILTER = 'cluster=~"$cluster", ray_io_cluster=~"$ray_cluster", namespace=~"$team"'
NODE_FILTER = 'cluster=~"$cluster|nodes", ray_io_cluster=~"$ray_cluster", namespace=~"$team", node=~"$node"'
GATEWAY_FILTER = f'{POD_FILTER}, model=~"$model"'
ENGINE_FILTER = f'{GATEWAY_FILTER}, replica=~"$replica"'


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (promql.select(metrics.TRAIN_LOSS), f'ray_strata_train_loss{{{POD_FILTER}, run=~"$run"}}'),
        (promql.select(metrics.SERVE_REQUESTS), f"strata_serve_requests_total{{{GATEWAY_FILTER}}}"),
        (promql.select(metrics.SERVE_KV_USAGE, 'a="b"'), f'strata_serve_kv_cache_usage{{a="b", {ENGINE_FILTER}}}'),
        (promql.select(series.JOB_STATUS), 'kuberay_job_deployment_status{namespace=~"$team"}'),
        (promql.select(series.NODE_CPUS, suffix="_x"), f'ray_node_cpu_count_x{{{POD_FILTER}, node=~"$node"}}'),
        # The exporter of a node belongs to no Ray cluster and no team.
        (promql.select(metrics.GPU_COUNT), 'strata_gpu_devices{cluster=~"$cluster|nodes", node=~"$node"}'),
        (promql.select(series.GPU_TEMPERATURE), f"strata:gpu:temperature_celsius{{{NODE_FILTER}}}"),
        (
            promql.highest(metrics.TRAIN_STEP, "cluster", "run"),
            f'max by (cluster, run) (ray_strata_train_step{{{POD_FILTER}, run=~"$run"}})',
        ),
        (
            promql.summed(metrics.SERVE_REPLICAS, "role", matchers=('role="decode"',)),
            f'sum by (role) (strata_serve_replicas{{role="decode", {GATEWAY_FILTER}}})',
        ),
        (
            promql.per_second(metrics.SERVE_REQUESTS, "model", matchers=('status=~"5.."',)),
            f'sum by (model) (rate(strata_serve_requests_total{{status=~"5..", {GATEWAY_FILTER}}}[$__rate_interval]))',
        ),
        (
            promql.quantile(0.95, metrics.SERVE_FIRST_TOKEN, "model"),
            "histogram_quantile(0.95, sum by (model, le) (rate(strata_serve_first_token_seconds_bucket"
            f"{{{GATEWAY_FILTER}}}[$__rate_interval])))",
        ),
        (
            promql.buckets(metrics.SERVE_KV_SECONDS),
            f"sum by (le) (increase(strata_serve_kv_transfer_seconds_bucket{{{ENGINE_FILTER}}}[$__rate_interval]))",
        ),
        (promql.or_zero("events", "there", "a", "b"), "events or on (a, b) there * 0"),
        (
            promql.burn(series.FIRST_TOKEN_MISSES["1h"]),
            f"max by (cluster, model) (strata:serve_first_token:slo_miss_ratio_rate1h{{{GATEWAY_FILTER}}}) / 0.01",
        ),
        (
            promql.burn(series.ERRORS["6h"], promql.AVAILABILITY),
            f"max by (cluster, model) (strata:serve_errors:ratio_rate6h{{{GATEWAY_FILTER}}}) / 0.001",
        ),
        (promql.most("x"), "topk(10, x)"),
        (promql.least("x"), "bottomk(10, x)"),
        (
            promql.over_range(series.TEAM_COST, "namespace"),
            'sum by (namespace) (sum_over_time(strata:team_cost_dollars:sum5m{cluster=~"$cluster|nodes", '
            'ray_io_cluster=~"$ray_cluster", namespace=~"$team"}[$__range:5m]))',
        ),
    ],
)
def test_expressions(made: str, expected: str) -> None:
    assert made == expected


QUERIES = {(query.board.removeprefix("strata-"), query.panel): query.expr for query in queries.every()}
P99 = "histogram_quantile(0.99, sum by (le) (rate(strata_serve_{}_seconds_bucket{{{}}}[$__rate_interval])))"


@pytest.mark.parametrize(
    ("board", "panel", "expected"),
    [
        ("oncall", "Alerts", 'ALERTS{alertstate="firing", cluster=~"$cluster"}'),
        ("oncall", "TTFT, p99", P99.format("first_token", GATEWAY_FILTER)),
        ("oncall", "ITL, p99", P99.format("inter_token", GATEWAY_FILTER)),
        (
            "oncall",
            "Server errors",
            f'(sum(sum by (cluster, model) (rate(strata_serve_requests_total{{status=~"5..", {GATEWAY_FILTER}}}'
            "[$__rate_interval]))) or vector(0)) / "
            f"sum(sum by (cluster, model) (rate(strata_serve_requests_total{{{GATEWAY_FILTER}}}[$__rate_interval])))",
        ),
        (
            "oncall",
            "KV cache usage, maximum",
            f"max(max by (cluster, model) (strata_serve_kv_cache_usage{{{ENGINE_FILTER}}}))",
        ),
        (
            "oncall",
            "Checkpoint age",
            f'time() - max by (cluster, run) (ray_strata_train_checkpoint_timestamp_seconds{{{POD_FILTER}, run=~"$run"}})',
        ),
        (
            "oncall",
            "Throughput",
            f'sum by (cluster, run) (rate(ray_strata_train_tokens_total{{{POD_FILTER}, run=~"$run"}}[$__rate_interval]))',
        ),
        (
            "oncall",
            "Fullest GPUs",
            f"topk(10, max by (cluster, node, gpu) (strata:gpu:memory_used_bytes{{{NODE_FILTER}}}) / "
            f"max by (cluster, node, gpu) (strata:gpu:memory_total_bytes{{{NODE_FILTER}}}))",
        ),
    ],
)
def test_queries_of_the_on_call_board(board: str, panel: str, expected: str) -> None:
    assert QUERIES[board, panel] == expected


def test_a_query_is_resolved_reads_series_and_needs_their_sources() -> None:
    query = queries.Query(
        "b", "p", 'rate(ray_strata_train_loss{run=~"$run"}[$__rate_interval]) + ray_node_cpu_count{x="$model"} + y[$__range:5m]'
    )
    resolved = query.resolved(run="a", time_range="3h")
    assert resolved == 'rate(ray_strata_train_loss{run=~"a"}[1m]) + ray_node_cpu_count{x=".*"} + y[3h:5m]'
    assert query.reads() == (metrics.TRAIN_LOSS, series.NODE_CPUS)
    assert query.sources() == {"ray"}
    histogram = queries.Query("b", "p", "strata_serve_first_token_seconds_bucket")
    assert histogram.reads() == (metrics.SERVE_FIRST_TOKEN,) and histogram.sources() == set()


# Limits


def steps(limits: Limits) -> list[tuple[float | None, str]]:
    return [(step.value, step.color) for step in limits.steps()]


def test_colours_of_limits() -> None:
    assert steps(Limits(1, 2)) == [(None, "green"), (1, "orange"), (2, "red")]
    assert steps(Limits(2, 1, falling=True)) == [(None, "red"), (1, "orange"), (2, "green")]
    assert steps(Limits(1, 1)) == [(None, "green"), (1, "red")]
    assert steps(Limits(1, 1, falling=True)) == [(None, "red"), (1, "green")]


def test_limits_of_quantities() -> None:
    """The objectives of the alert rules, the burn rate of the slow alert, and the temperature at which GPUs throttle."""
    found = {name: (each.watch, each.bad, each.falling) for name, each in vars(style).items() if isinstance(each, Limits)}
    assert found == {
        "FULL": (0.85, 0.95, False),
        "FULL_PERCENT": (85, 95, False),
        "HOT": (80, 88, False),
        "ANY": (1, 5, False),
        "ANY_PER_SECOND": (0.001, 0.1, False),
        "FIRST_TOKEN": (1.0, 2.0, False),
        "INTER_TOKEN": (0.05, 0.1, False),
        "BURN": (1.0, 6.0, False),
        "MISSED": (0.005, 0.01, False),
        "BUSY": (0.5, 0.1, True),
        "IDLE": (0.1, 0.3, False),
        "ANSWERING": (1, 1, True),
        "CHECKPOINT_AGE": (1800, 3600, False),
    }


# Panels


def drawn(panel: panels.Panel) -> dict[str, Any]:
    """JSON of a panel alone on a board."""
    *_, made = Board("u", "t", "d", (), (Row("r", (panel,)),)).json()["panels"]
    found: dict[str, Any] = made
    return found


A, B = Line("a", "{{x}} p99"), Line("b", "y")


def test_lines() -> None:
    plain = drawn(panels.lines("t", "d", Unit.SECONDS, A, B, top=2.0))
    assert [(target["refId"], target["expr"], target["range"]) for target in plain["targets"]] == [
        ("A", "a", True),
        ("B", "b", True),
    ]
    custom = plain["fieldConfig"]["defaults"]["custom"]
    assert (custom["fillOpacity"], custom["spanNulls"], custom["axisSoftMin"], custom["lineWidth"]) == (8, 60000, 0, 1)
    assert "stacking" not in custom and "thresholdsStyle" not in custom
    assert plain["fieldConfig"]["defaults"]["max"] == 2.0 and plain["fieldConfig"]["defaults"]["unit"] == "s"
    assert plain["gridPos"]["w"] == 12 and plain["gridPos"]["h"] == 8
    [override] = plain["fieldConfig"]["overrides"]
    assert override["matcher"]["options"] == "/(^| )p99$/"
    assert override["properties"][0]["value"] == {"mode": "fixed", "fixedColor": "red"}


def test_stacked_and_logarithmic_lines() -> None:
    custom = drawn(panels.lines("t", "d", Unit.COUNT, B, stacked=True, logarithmic=True, limits=style.ANY))["fieldConfig"][
        "defaults"
    ]
    assert custom["custom"]["fillOpacity"] == 40 and custom["custom"]["stacking"] == {"mode": "normal", "group": "A"}
    assert custom["custom"]["scaleDistribution"] == {"type": "log", "log": 10} and "axisSoftMin" not in custom["custom"]
    assert custom["custom"]["thresholdsStyle"]["mode"] == "dashed"
    assert [step["value"] for step in custom["thresholds"]["steps"]] == [None, 1, 5] and "max" not in custom


def test_numbers_have_a_coloured_background_only_with_limits() -> None:
    for limits, mode in ((style.FULL, "background"), (None, "value")):
        made = drawn(panels.number("t", "d", Unit.RATIO, A, limits, empty="none"))
        assert made["options"]["colorMode"] == mode and made["fieldConfig"]["defaults"]["noValue"] == "none"
        assert (made["gridPos"]["w"], made["gridPos"]["h"]) == (4, 4)
        assert made["options"]["reduceOptions"] == {"calcs": ["lastNotNull"], "values": False}


def test_bars_tables_and_heatmaps() -> None:
    bar = drawn(panels.bars("t", "d", Unit.RATIO, A, top=1))
    assert bar["targets"][0]["instant"] and bar["fieldConfig"]["defaults"]["min"] == 0
    table = drawn(panels.table_of("t", "d", "x"))
    assert table["targets"][0]["instant"] and table["targets"][0]["format"] == "table"
    assert table["transformations"][0]["options"]["indexByName"] == {"severity": 0, "alertname": 1}
    two = drawn(panels.bars("t", "d", Unit.RATIO, A, B))
    assert [(target["refId"], target["expr"], target["instant"]) for target in two["targets"]] == [
        ("A", "a", True),
        ("B", "b", True),
    ]
    heat = drawn(panels.heat("t", "d", "x"))
    assert heat["targets"][0]["range"] and heat["targets"][0]["format"] == "heatmap"
    assert heat["targets"][0]["legendFormat"] == "{{le}}" and heat["options"]["calculate"] is False
    assert heat["fieldConfig"]["defaults"]["unit"] == "s"
    assert drawn(panels.heat("t", "d", "x", Unit.CELSIUS))["options"]["yAxis"]["unit"] == "celsius"
    alerts = drawn(panels.alert_list("t", "d"))["options"]
    assert {state for state, on in alerts["stateFilter"].items() if on} == {"firing", "pending", "error"}
    assert alerts["maxItems"] == 20


def test_widths_are_even() -> None:
    made = even(6, [panels.heat("a", "d", "x"), panels.number("b", "d", Unit.COUNT, A)])
    assert [(panel.title, panel.width) for panel in made] == [("a", 6), ("b", 6)]


# Alerts


@pytest.mark.parametrize(
    ("duration", "expected"),
    [("0s", 0), ("5s", 5), ("1m", 60), ("90m", 5400), ("1h30m", 5400), ("1d", 86400), ("1d2h3m4s", 93784)],
)
def test_seconds_of_prometheus_durations(duration: str, expected: int) -> None:
    assert alert_rules.seconds(duration) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0s"),
        (59, "59s"),
        (60, "1m"),
        (61, "1m1s"),
        (3600, "1h"),
        (3661, "1h1m1s"),
        (86400, "1d"),
        (172800, "2d"),
        (90000, "25h"),
    ],
)
def test_durations_as_grafana_writes_them(seconds: int, expected: str) -> None:
    assert alert_rules.written(seconds) == expected


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("StrataGpuHot", "strata-gpu-hot"),
        ("Hot 2", "strata-hot-2"),
        ("HTTPErrors", "strata-httperrors"),
        ("Gpu0Lost!", "strata-gpu0-lost"),
        ("A" + "b" * 60, "strata-a" + "b" * 32),
    ],
)
def test_uids_of_alerts(title: str, expected: str) -> None:
    assert alert_rules.uid(title) == expected


@pytest.mark.parametrize(("interval", "expected"), [("10s", 10), ("11s", 20), ("15s", 20), ("1m", 60), (None, 60)])
def test_intervals_are_rounded_up_to_grafanas_beat(tmp_path: Path, interval: str | None, expected: int) -> None:
    every = f"interval: {interval}, " if interval else ""
    text = f"groups: [{{name: g, {every}rules: [{{alert: Hot, expr: a}}]}}, {{name: records, rules: [{{record: r, expr: a}}]}}]"
    (tmp_path / "rules.yaml").write_text(text)
    [group] = alert_rules.read(tmp_path)
    assert (group.name, group.interval_s) == ("g", expected)


def test_an_alert_fires_for_every_series(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("""
groups:
- name: g
  rules:
  - alert: Hot
    expr: " temperature > 80 "
    for: 90s
    keep_firing_for: 5m
    labels: {severity: page, level: 2}
    annotations: {summary: "{{ $labels.gpu }} is at {{ $value }}, $values", note: " x "}
  - {alert: Cold, expr: b}
""")
    [group] = alert_rules.read(tmp_path)
    body = group.json("folder")
    assert (body["title"], body["folderUid"], body["interval"]) == ("g", "folder", 60)
    hot, cold = body["rules"]
    assert {**hot, "data": None} == {
        "uid": "strata-hot",
        "title": "Hot",
        "condition": "C",
        "data": None,
        "noDataState": "OK",
        "execErrState": "Error",
        "for": "1m30s",
        "keep_firing_for": "5m",
        "labels": {"severity": "page", "level": "2"},
        "annotations": {"summary": "{{ $labels.gpu }} is at {{ $values.A.Value }}, $values", "note": "x"},
        "isPaused": False,
        "folderUID": "folder",
        "ruleGroup": "g",
    }
    query, exists, above = hot["data"]
    assert query["model"]["expr"] == "temperature > 80" and query["model"]["instant"] is True and query["model"]["range"] is False
    assert [node["relativeTimeRange"] for node in hot["data"]] == [
        {"from": 600, "to": 0},
        {"from": 0, "to": 0},
        {"from": 0, "to": 0},
    ]
    assert exists["model"]["expression"] == "is_number($A) || is_nan($A) || is_inf($A)"
    assert above["model"]["conditions"] == [{"evaluator": {"type": "gt", "params": [0]}}] and above["model"]["expression"] == "B"
    assert {(node["model"]["intervalMs"], node["model"]["maxDataPoints"]) for node in hot["data"]} == {(1000, 43200)}
    assert cold["for"] == "0s" and "keep_firing_for" not in cold and cold["labels"] == {}
