"""Prometheus rules: promtool checks, and checks that the series they read are exported and not dropped by the scrape."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from support import KUBECTL, ROOT

from strata.monitoring.prometheus import manifests, scrape, server
from strata.platform import metrics
from strata.platform.errors import UserError
from strata.serving.routing import policy

RULES = ROOT / "infra" / "prometheus" / "rules"
TESTS = ROOT / "infra" / "prometheus" / "tests"
COMPONENTS = ROOT / "infra" / "components"
GROUPS = [group for file in sorted(RULES.glob("*.yaml")) for group in yaml.safe_load(file.read_text())["groups"]]
EVERY = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in EVERY if "alert" in rule]
RECORDED = {rule["record"] for rule in EVERY if "record" in rule}
OURS = {metric.exported: metric for metric in metrics.EVERY}
SCRAPED = (
    *(scrape.RAY_SERIES + scrape.ENDPOINT_SERIES + scrape.GPU_SERIES + scrape.DCGM_SERIES + scrape.KUBERAY_SERIES),
    *RECORDED,
)


@pytest.fixture(scope="module")
def promtool() -> str:
    try:
        return server.binary("promtool")
    except UserError as error:
        pytest.skip(str(error))


def run(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def selectors(expression: Any) -> Iterator[promql_parser.VectorSelector]:
    """Selectors of a parsed expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("vs", "vector_selector", "expr", "lhs", "rhs", "param"):
        inner = getattr(expression, name, None)
        if inner is not None and not isinstance(inner, str):
            yield from selectors(inner)
    for argument in getattr(expression, "args", ()):
        yield from selectors(argument)


def selectors_of(rule: dict[str, Any]) -> list[promql_parser.VectorSelector]:
    return list(selectors(promql_parser.parse(rule["expr"])))


def base(name: str) -> str:
    """Metric name of a histogram's _bucket, _count or _sum series."""
    short = re.sub(r"_(bucket|count|sum)$", "", name)
    return short if short in OURS and OURS[short].kind == "histogram" else name


def test_promtool_accepts_the_rules(promtool: str) -> None:
    run(promtool, "check", "rules", *sorted(RULES.glob("*.yaml")))


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(TESTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_rules_pass_their_unit_tests(promtool: str, file: Path) -> None:
    run(promtool, "test", "rules", file)


def test_promtool_accepts_the_local_configuration(promtool: str, tmp_path: Path) -> None:
    config = server.write_files(tmp_path, 9090, ["http://127.0.0.1:8000", "https://models.example"], gpu_port=9835)
    run(promtool, "check", "config", config)
    assert sorted(file.name for file in (tmp_path / "rules").iterdir()) == sorted(file.name for file in RULES.iterdir())


def test_every_alert_has_a_firing_and_a_not_firing_test() -> None:
    fires, not_firing = set[str](), set[str]()
    for case in (case for file in TESTS.glob("*.yaml") for case in yaml.safe_load(file.read_text())["tests"]):
        outcomes: dict[str, set[bool]] = {}
        for check in case.get("alert_rule_test", []):
            outcomes.setdefault(check["alertname"], set()).add(bool(check.get("exp_alerts")))
        fires |= {name for name, seen in outcomes.items() if True in seen}
        not_firing |= {name for name, seen in outcomes.items() if seen == {False}}  # in a test case of its own
    names = {rule["alert"] for rule in ALERTS}
    assert len(names) == len(ALERTS)
    assert fires == names
    assert not_firing == names


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_has_severity_annotations_and_documentation(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert "{{ $" in rule["annotations"]["summary"]
    assert f"| `{rule['alert']}` |" in (ROOT / "docs" / "monitoring.md").read_text()


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rule_reads_only_exported_and_scraped_series(rule: dict[str, Any]) -> None:
    found = selectors_of(rule)
    assert found
    for selector in found:
        name = selector.name
        assert name, "a selector needs a metric name"
        assert any(re.fullmatch(pattern, name) for pattern in SCRAPED), f"{name} is dropped by the scrape"
        if "strata_" not in name:
            continue
        assert base(name) in OURS, f"no program exports {name}"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= {*OURS[base(name)].labels, "cluster", "le"}, f"{name} has no labels {labels}"


def test_the_parser_finds_every_selector() -> None:
    text = """max by (x) (a{l="1"} unless on (x) rate(b[5m])) > 2 * quantile_over_time(0.9, c[1h] offset 5m)
              or label_replace(-d, "", "", "", "") and (e or count_values("x", f))"""
    assert {selector.name for selector in selectors(promql_parser.parse(text))} == set("abcdef")


def test_rules_aggregate_by_cluster() -> None:
    for rule in EVERY:
        if rule.get("record") not in ("strata:gpu_nodes_dcgm:group", "strata:gpu_nodes_own:group"):
            for labels in re.findall(r"(?:max|sum|count_values) by \(([^)]*)\)", rule["expr"]):
                assert "cluster" in labels.split(", "), rule


def test_objectives_are_bucket_bounds_and_reasons_exist() -> None:
    for metric in (metrics.SERVE_FIRST_TOKEN, metrics.SERVE_INTER_TOKEN):
        bounds = {str(bound) for bound in metric.buckets}
        rules = [rule for rule in EVERY if f"{metric.name}_bucket" in rule["expr"]]
        assert len(rules) == 4
        assert all(set(re.findall(r'le="([^"]*)"', rule["expr"])) <= bounds for rule in rules)
    [fallback] = [rule for rule in ALERTS if rule["alert"] == "StrataPrefillFallback"]
    reasons = set(re.search(r'reason=~"([^"]*)"', fallback["expr"])[1].split("|"))  # type: ignore[index]
    assert reasons <= {*policy.LOCAL, "prefill-failed"}
    assert not reasons & {"short", "cached", "cheaper-here"}


@pytest.mark.parametrize("name", manifests.FILES)
def test_cluster_objects_are_up_to_date(name: str) -> None:
    committed = (COMPONENTS / name).read_text()
    assert committed == manifests.render(name), "run 'python -m strata.monitoring.prometheus.manifests'"


def test_cluster_rules_equal_local_rules() -> None:
    for [built] in (manifests.prometheus_rules(), manifests.google_rules()):
        assert [rule for group in built["spec"]["groups"] for rule in group["rules"]] == EVERY


@pytest.mark.parametrize(
    ("component", "kinds"),
    [
        ("monitoring", ["PodMonitor"] * 4 + ["PrometheusRule"]),
        ("monitoring-gke", ["ClusterRules"] + ["PodMonitoring"] * 3),
        ("monitoring-arms", ["PodMonitor"] * 4),
    ],
)
def test_components_build(tmp_path: Path, component: str, kinds: list[str]) -> None:
    for name in ("monitoring", "monitoring-gke", "monitoring-arms"):
        shutil.copytree(COMPONENTS / name, tmp_path / name)
    content = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "components": [component]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run([KUBECTL, "kustomize", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    assert sorted(built["kind"] for built in objects) == kinds
    for built in objects:
        annotations = built["metadata"].get("annotations", {})
        assert (annotations.get("arms.prometheus.io/discovery") == "true") == (component == "monitoring-arms")
        assert ("release" in built["metadata"]["labels"]) == (component == "monitoring")


def test_dropped_labels_do_not_distinguish_series() -> None:
    """Labels are those that Ray's agent writes on a training series."""
    labels = ("Component", "NodeAddress", "SessionName", "Version", "WorkerId", "otel_scope_name", "otel_scope_version", "run")
    assert [label for label in labels if re.fullmatch(scrape.RAY_DROPPED_LABELS, label)] == [
        "Version",
        "otel_scope_name",
        "otel_scope_version",
    ]
