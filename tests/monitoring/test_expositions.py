"""Every series and label that rules and dashboards read is one that a program exports.

Strata's own metrics are defined in code, Ray's agent defines its gauges in Python, and `expositions` has what other programs
export, derived from their sources or recorded."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from questions import PANELS, RULES, series_of
from support import ROOT

from strata.platform import metrics

from .expositions import derive

EXPOSITIONS = ROOT / "tests" / "monitoring" / "expositions"
COMPONENTS = ROOT / "infra" / "components"
# Labels that a scrape adds to every series of its target (strata.monitoring.prometheus.manifests and scrape), and the names that
# it gives to labels of the exporter that are in their way.
TARGET = {"cluster", "namespace", "ray_io_cluster", "node", "pod", "container", "job", "instance"}
MOVED = {"exported_namespace", "exported_pod", "exported_container"}
# Prometheus itself. A firing alert has the labels of its expression.
ALERTS = {"alertname", "alertstate", "severity", "run", "model", "gpu", "node"}
OLD_NAMES = {"DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"}  # in exporters that the cluster had before


def exposed(file: str) -> dict[str, set[str]]:
    """Labels by name of the series in a file. As Prometheus reads them: the Python client renames counters without `_total`."""
    lines = re.findall(r"^(\w+)\{(.*)\} 1$", (EXPOSITIONS / file).read_text(), re.MULTILINE)
    assert lines
    return {name: set(re.findall(r'(\w+)=""', labels)) for name, labels in lines}


def ray_agent() -> dict[str, set[str]]:
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    return {metrics.RAY_PREFIX + name: set(gauge.view.columns) for name, gauge in METRICS_GAUGES.items()}


def ray_panels() -> dict[str, set[str]]:
    """Names in Ray's own dashboards, for counters that exist from the first event on."""
    from ray.dashboard.modules.metrics.dashboards import default_dashboard_panels

    text = Path(default_dashboard_panels.__file__).read_text()
    return {name: set() for name in re.findall(r"ray_\w+_total", text)}


def own() -> dict[str, set[str]]:
    names = {name: set(metric.labels) for metric in metrics.EVERY for name in series_of(metric)}
    # Ray labels series of workers, and its agent those of every process of the node.
    return {
        name: labels
        | ({"le"} if name.endswith("_bucket") else set())
        | ({"WorkerId", "SessionName"} if "ray_" in name else set())
        for name, labels in names.items()
    }


def recorded() -> dict[str, set[str]]:
    """Labels that recording rules can have: those that their text names."""
    found: dict[str, set[str]] = {}
    for rule in RULES:
        if "record" in rule:
            words = set(re.findall(r"[a-zA-Z_]\w*", rule["expr"])) | rule.get("labels", {}).keys()
            found[rule["record"]] = found.get(rule["record"], set()) | words
    for name, words in found.items():  # a rule that aggregates nothing has the labels of the records it reads
        for other in found:
            if re.search(rf"(?<![\w:]){other}(?![\w:])", " ".join(r["expr"] for r in RULES if r.get("record") == name)):
                words |= found[other]
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    foreign = {
        **ray_panels(),
        **ray_agent(),
        **exposed("ray.txt"),
        **exposed("kuberay_operator.txt"),
        **exposed("kube_state_metrics.txt"),
        **exposed("dcgm_exporter.txt"),
    }
    foreign |= dict.fromkeys(OLD_NAMES, foreign["DCGM_FI_DEV_CLOCKS_EVENT_REASONS"])
    return {name: labels | TARGET | MOVED for name, labels in {**own(), **foreign, **recorded()}.items()} | {
        "up": TARGET,
        "ALERTS": ALERTS | TARGET,
    }


def nodes(expression: Any) -> Iterator[Any]:
    yield expression
    for name in ("vs", "vector_selector", "expr", "lhs", "rhs", "param"):
        inner = getattr(expression, name, None)
        if inner is not None and not isinstance(inner, str):
            yield from nodes(inner)
    for argument in getattr(expression, "args", ()):
        yield from nodes(argument)


def unknown(expr: str, known: dict[str, set[str]]) -> list[str]:
    """Series that nothing exports, and labels that the series of an expression do not have."""
    found = []
    for node in nodes(promql_parser.parse(expr)):
        if isinstance(node, promql_parser.VectorSelector):
            if node.name not in known:
                found.append(str(node.name))
                continue
            labels = {matcher.name for matcher in node.matchers.matchers}
            found += [f"{node.name}{{{label}}}" for label in labels - known[str(node.name)]]
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            inside = list(nodes(node.expr))
            names = {str(each.name) for each in inside if isinstance(each, promql_parser.VectorSelector)}
            have = set().union(*(known.get(name, set()) for name in names))
            for call in inside:
                if isinstance(call, promql_parser.Call) and call.func.name in ("label_replace", "label_join"):
                    have.add(call.args[1].val)
                if isinstance(call, promql_parser.AggregateExpr) and isinstance(call.param, promql_parser.StringLiteral):
                    have.add(call.param.val)  # count_values
            found += [f"by ({label}) of {', '.join(sorted(names))}" for label in set(node.modifier.labels) - have]
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_reads_what_is_exported(rule: dict[str, Any], known: dict[str, set[str]]) -> None:
    assert not unknown(rule["expr"], known)


def test_dashboards_read_what_is_exported(known: dict[str, set[str]]) -> None:
    assert not {f"{query.board}: {query.panel}": found for query in PANELS if (found := unknown(query.resolved(), known))}


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("sum(kuberay_cluster_ready)", ["kuberay_cluster_ready"]),
        ('kuberay_job_info{owner="x"}', ["kuberay_job_info{owner}"]),
        ("sum by (Hostname) (DCGM_FI_DEV_GPU_UTIL)", []),
        ("sum by (hostname) (DCGM_FI_DEV_GPU_UTIL)", ["by (hostname) of DCGM_FI_DEV_GPU_UTIL"]),
        ('sum by (host) (label_replace(DCGM_FI_DEV_GPU_UTIL, "host", "$1", "Hostname", "(.+)"))', []),
        ('max by (x) (count_values("x", rate(strata_serve_requests_total[5m])))', []),
        ("rate(strata_serve_first_token_seconds_total[5m])", ["strata_serve_first_token_seconds_total"]),
        ("a offset 5m or -b", ["a", "b"]),
        ('up{RayNodeType="head"}', ["up{RayNodeType}"]),
    ],
)
def test_unknown_series_and_labels_are_found(expr: str, expected: list[str], known: dict[str, set[str]]) -> None:
    assert unknown(expr, known) == expected


# NVIDIA's exporter


def test_counters_are_fields_of_the_pinned_dcgm() -> None:
    """The exporter ends at an unknown name, and without SYS_ADMIN at a profiling field."""
    fields = set((EXPOSITIONS / "dcgm_fields.txt").read_text().split())
    plain, profiling = (derive.counters(COMPONENTS / name / "counters.csv") for name in ("dcgm", "dcgm-profiling"))
    for watched in (plain, profiling):
        names = [name for name, _ in watched]
        assert len(names) == len(set(names)) and set(names) <= fields
        assert {kind for _, kind in watched} <= {"gauge", "counter", "label"}
    assert not [name for name, _ in plain if name.startswith("DCGM_FI_PROF_")]
    assert profiling[: len(plain)] == plain
    assert all(name.startswith("DCGM_FI_PROF_") for name, _ in profiling[len(plain) :])
    assert fields >= OLD_NAMES


def test_rules_and_dashboards_read_only_fields_that_dcgm_watches_without_privileges() -> None:
    watched = {name for name, _ in derive.counters(COMPONENTS / "dcgm" / "counters.csv")} | OLD_NAMES
    text = " ".join([*(rule["expr"] for rule in RULES), *(query.expr for query in PANELS)])
    read = set(re.findall(r"DCGM_\w+", text))
    assert read and read <= watched


def test_the_exporter_runs_at_the_version_of_the_expositions() -> None:
    exporter = yaml.safe_load((COMPONENTS / "dcgm" / "exporter.yaml").read_text())
    [container] = exporter["spec"]["template"]["spec"]["containers"]
    assert re.fullmatch(rf"nvidia/dcgm-exporter:{re.escape(derive.DCGM_EXPORTER)}-\w+[\d.]*", container["image"])
    for guide in ("gke", "ack"):
        install = re.search(r"kuberay-helm/ --version (\S+)", (ROOT / "docs" / f"cluster-{guide}.md").read_text())
        assert install and f"v{install[1]}" == derive.KUBERAY
