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

from strata.dashboards import alert_rules
from strata.monitoring.prometheus import manifests, runbooks, scrape, server
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
    *(scrape.RAY_SERIES + scrape.ENDPOINT_SERIES + scrape.GPU_SERIES + scrape.DCGM_SERIES),
    *(scrape.KUBERAY_SERIES + scrape.KUBE_STATE_SERIES),
    *("up", *RECORDED),
)
CASES = [case for file in sorted(TESTS.glob("*.yaml")) for case in yaml.safe_load(file.read_text())["tests"]]
DOCS = (ROOT / "docs" / "monitoring.md").read_text()
# Alerts on an object that is no RayCluster, or on none.
OF_AN_OBJECT = {"StrataServiceNotReady": "name", "StrataJobFailed": "name", "StrataOperatorNotScraped": "namespace"}


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
    for case in CASES:
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
def test_alert_has_severity_annotations_and_a_runbook(rule: dict[str, Any]) -> None:
    name, severity = rule["alert"], rule["labels"]["severity"]
    assert severity in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert "{{ $" in rule["annotations"]["summary"] + rule["annotations"]["description"]
    assert rule["annotations"]["runbook_url"] == f"{runbooks.BASE}#{name.lower()}"
    assert f"| [`{name}`](#{name.lower()}) | {severity} |" in DOCS
    assert re.search(rf"^### {name}\n\n\S", DOCS, re.MULTILINE), "a runbook of its own"


def test_documentation_has_no_alert_that_does_not_exist() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert sorted(re.findall(r"^### (Strata\w+)$", DOCS, re.MULTILINE)) == sorted(names)
    assert sorted(re.findall(r"^\| \[`(Strata\w+)`\]", DOCS, re.MULTILINE)) == sorted(names)
    assert set(re.findall(r"\(#(strata\w+)\)", DOCS)) == {name.lower() for name in names}


def test_address_of_runbooks_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRATA_RUNBOOKS", "https://wiki.example/ops")
    [built] = manifests.prometheus_rules()
    local = server.write_files(tmp_path, 9090, [], gpu_port=9835).parent / "rules"
    pushed = [rule for group in alert_rules.read(RULES) for rule in group.rules]
    texts = [str(built), *(file.read_text() for file in local.iterdir()), str(pushed)]
    assert not any(runbooks.BASE in text for text in texts)
    links = [
        rule["annotations"]["runbook_url"] for group in built["spec"]["groups"] for rule in group["rules"] if "alert" in rule
    ]
    assert sorted(links) == sorted(f"https://wiki.example/ops#{rule['alert'].lower()}" for rule in ALERTS)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_names_its_ray_cluster_and_namespace(rule: dict[str, Any]) -> None:
    """In a test case with the labels of GKE, where `cluster` is the GKE cluster."""
    checks = [check for case in CASES for check in case.get("alert_rule_test", []) if check["alertname"] == rule["alert"]]
    labels = [alert["exp_labels"] for check in checks for alert in check.get("exp_alerts") or []]
    wanted = {"cluster", "namespace", OF_AN_OBJECT.get(rule["alert"], "ray_io_cluster")}
    assert any(wanted <= each.keys() and each["cluster"] == "gke" for each in labels)
    assert not [case["name"] for case in CASES for each in labels if each.get("ray_io_cluster") == "gke"]


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rule_reads_only_scraped_series(rule: dict[str, Any]) -> None:
    found = selectors_of(rule)
    assert found
    for selector in found:
        name = selector.name
        assert name, "a selector needs a metric name"
        assert any(re.fullmatch(pattern, name) for pattern in SCRAPED), f"{name} is dropped by the scrape"
        if "strata_" in name:
            assert base(name) in OURS, f"no program exports {name}"


def test_the_parser_finds_every_selector() -> None:
    text = """max by (x) (a{l="1"} unless on (x) rate(b[5m])) > 2 * quantile_over_time(0.9, c[1h] offset 5m)
              or label_replace(-d, "", "", "", "") and (e or count_values("x", f))"""
    assert {selector.name for selector in selectors(promql_parser.parse(text))} == set("abcdef")


def test_error_budgets_have_four_pairs_of_windows() -> None:
    """5 minutes to 3 days: the workbook's burn rates of 14.4, 6, 3 and 1 for a budget of 0.1%."""
    for kind, record in (("ErrorBudget", "strata:serve_errors:ratio_rate"), ("Availability", "strata:serve_unavailable:ratio")):
        rules = {rule["alert"]: rule["expr"] for rule in ALERTS if rule["alert"].startswith(f"Strata{kind}Burn")}
        assert set(rules) == {f"Strata{kind}BurnFast", f"Strata{kind}BurnSlow"}
        found = re.findall(rf"{record}(\w+) > ([\d.]+) \* 0.001", rules[f"Strata{kind}BurnFast"] + rules[f"Strata{kind}BurnSlow"])
        pairs = [("5m", "1h", "14.4"), ("30m", "6h", "6"), ("2h", "1d", "3"), ("6h", "3d", "1")]
        assert found == [(window, rate) for short, long, rate in pairs for window in (short, long)]
        assert {f"{record}{window}" for window, _ in found} <= RECORDED
        for rule in EVERY:
            if str(rule.get("record", "")).startswith(record):
                assert set(re.findall(r"\[(\w+)\]", rule["expr"])) <= {rule["record"].removeprefix(record)}


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


SHARED = "strata-monitoring"


@pytest.mark.parametrize(
    ("component", "kinds"),
    [
        ("monitoring", ["PodMonitor"] * 4 + ["PrometheusRule"]),
        ("monitoring-gke", ["ClusterPodMonitoring"] * 2 + ["ClusterRules"] + ["PodMonitoring"] * 3),
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
        # Only the monitors of Ray's pods belong to a team; two teams share the others.
        of_a_team = built["metadata"]["name"] in ("strata-ray", "strata-endpoint")
        assert built["metadata"].get("namespace", SHARED) == ("strata" if of_a_team else SHARED)


def test_every_monitor_sets_the_ray_cluster() -> None:
    def endpoint(built: dict[str, Any]) -> dict[str, Any]:
        [found] = built["spec"].get("podMetricsEndpoints") or built["spec"]["endpoints"]
        return found

    monitors = {built["metadata"]["name"]: built for built in manifests.pod_monitors()}
    google = {built["metadata"]["name"]: built for built in manifests.pod_monitorings()}
    assert set(google) == {*monitors, "strata-kube-state-metrics"}
    for name in ("strata-ray", "strata-endpoint"):
        set_by = {rule["targetLabel"]: rule["sourceLabels"] for rule in endpoint(monitors[name])["relabelings"]}
        assert set_by["ray_io_cluster"] == ["__meta_kubernetes_pod_label_ray_io_cluster"]
        assert google[name]["spec"]["targetLabels"]["fromPod"] == [{"from": "ray.io/cluster", "to": "ray_io_cluster"}]
        assert "namespaceSelector" not in monitors[name]["spec"], "the monitor's own namespace, also if a team renames it"
    protected = {"project_id", "location", "cluster", "namespace", "job", "instance"}
    for built in google.values():
        assert not protected & {rule.get("targetLabel") for rule in endpoint(built)["metricRelabeling"]}, "Google refuses it"


@pytest.mark.parametrize(
    ("series", "cluster"),
    [
        ("kuberay_cluster_info;train-x", "train-x"),
        ("kuberay_cluster_condition_provisioned;a-b", "a-b"),
        ("kuberay_job_info;train", None),
        ("kuberay_service_condition_ready;strata", None),
    ],
)
def test_the_operators_name_is_a_ray_cluster_only_in_series_of_clusters(series: str, cluster: str | None) -> None:
    """The operator is scraped on every kind of cluster, in any namespace, with the object's own namespace."""
    [operator] = [built for built in manifests.pod_monitors() if built["metadata"]["name"] == "strata-kuberay"]
    [google] = [built for built in manifests.pod_monitorings() if built["metadata"]["name"] == "strata-kuberay"]
    labels = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    assert operator["spec"]["selector"] == google["spec"]["selector"] == labels
    assert operator["spec"]["namespaceSelector"] == {"any": True} and google["kind"] == "ClusterPodMonitoring"
    [endpoint], [google_endpoint] = operator["spec"]["podMetricsEndpoints"], google["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True and google["spec"]["targetLabels"] == {"metadata": []}
    assert endpoint["port"] == google_endpoint["port"] == "http"
    for rules in (endpoint["metricRelabelings"], google_endpoint["metricRelabeling"]):
        [rule] = [rule for rule in rules if rule.get("targetLabel") == "ray_io_cluster"]
        assert rule["sourceLabels"] == ["__name__", "name"]
        found = re.fullmatch(rule["regex"], series)
        assert (found[1] if found else None) == cluster


def test_dropped_labels_do_not_distinguish_series() -> None:
    """Labels are those that Ray's agent writes on a training series."""
    labels = ("Component", "NodeAddress", "SessionName", "Version", "WorkerId", "otel_scope_name", "otel_scope_version", "run")
    assert [label for label in labels if re.fullmatch(scrape.RAY_DROPPED_LABELS, label)] == [
        "Version",
        "otel_scope_name",
        "otel_scope_version",
    ]
