"""Texts inside objects: YAML and JSON of ConfigMaps and annotations, start parameters, recipes and Prometheus rules."""

from typing import Any

import pytest
from support import ROOT

from strata.deploy.checks.embedded import prometheus_rules, recipes, texts

Document = dict[str, Any]


def config_map(**data: str) -> Document:
    return {"kind": "ConfigMap", "metadata": {"name": "m"}, "data": data}


def texts_of(document: Document) -> list[tuple[str, str]]:
    return [(finding.path, finding.message) for finding in texts.findings(document)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"a": [1, 2]}', None),
        ("a.json", '{"a": [1, 2}', "is not valid JSON"),
        ("a.json", "", "is not valid JSON"),
        ("a.json", "{'a': 1}", "is not valid JSON"),
        ("a.json", '{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ("a.json", '{"a": NaN}', "NaN is not a number"),
        ("a.yaml", "a: 1\n---\nb: [2]\n", None),
        ("a.yml", "a: [1\n", "is not valid YAML"),
        ("a.yaml", "a: 1\na: 2\n", "the key 'a' occurs twice"),
        ("a.yaml", "b: {a: 1, a: 2}\n", "the key 'a' occurs twice"),
        ("a.yaml", "x: &x {a: 1}\ny: {<<: *x, a: 2}\n", None),
        ("a.csv", "a: [1\n", None),
    ],
)
def test_files_of_config_maps(name: str, text: str, message: str | None) -> None:
    found = texts_of(config_map(**{name: text}))
    assert [path for path, _ in found] == ([f"data.{name}"] if message else [])
    assert message is None or message in found[0][1]


INTERFACES = "networking.gke.io/interfaces"
TWO = '[{"interfaceName":"eth0","network":"default"},{"interfaceName":"eth1","network":"rdma"}]'


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({INTERFACES: TWO}, None),
        ({INTERFACES: TWO, "networking.gke.io/default-interface": "eth1"}, None),
        ({INTERFACES: TWO, "networking.gke.io/default-interface": "eth2"}, "has no interface eth2"),
        ({INTERFACES: TWO[:-1]}, "is not valid JSON"),
        ({INTERFACES: "- interfaceName: eth0"}, "is not valid JSON"),
        ({INTERFACES: TWO.replace("eth1", "eth0")}, "the interface eth0 occurs twice"),
        ({INTERFACES: TWO.replace('"network":"rdma"', '"net":"rdma"')}, "interface 1 has no network"),
        ({INTERFACES: "{}"}, "is not a list of interfaces"),
        ({"example.com/any": '{"a": 1'}, "is not valid JSON"),
        ({"example.com/any": '[{"a": 1}]'}, None),
        ({"example.com/any": "[not json"}, None),
        ({"example.com/any": "{{ template }}"}, None),
        ({"devices.gke.io/container.tcpxo-daemon": "- path: /dev/nvidia0\n- path: /dev/nvidiactl\n"}, None),
        ({"devices.gke.io/container.tcpxo-daemon": "- path: [/dev\n"}, "is not valid YAML"),
    ],
)
def test_annotations_of_objects_and_pods(annotations: dict[str, str], message: str | None) -> None:
    metadata = {"name": "a", "annotations": annotations}
    template = {"metadata": {"annotations": annotations}, "spec": {"containers": []}}
    found = texts_of({"kind": "Deployment", "metadata": metadata, "spec": {"template": template}})
    key = next(iter(annotations))
    where = [f"metadata.annotations.{key}", f"spec.template.metadata.annotations.{key}"]
    assert [path for path, _ in found] == (where if message else [])
    assert all(message is None or message in text for _, text in found)


@pytest.mark.parametrize(
    ("value", "valid"), [('{"a": 1}', True), ('{"a": 1', False), ("[::]:80", True), ("{x}", True), ("", True), ('["a"]', True)]
)
def test_variables_that_look_like_json(value: str, valid: bool) -> None:
    container = {"name": "c", "env": [{"name": "A"}, {"name": "B", "value": value}]}
    found = texts_of({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]}})
    assert [path for path, _ in found] == ([] if valid else ["spec.containers[0].env[1].value"])


@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        ({"num-cpus": "0", "object-store-memory": "1000", "dashboard-host": "0.0.0.0"}, None),
        ({"num-cpus": "two"}, "num-cpus"),
        ({"num-gpus": "0.5"}, "num-gpus"),
        ({"object-store-memory": "1Gi"}, "object-store-memory"),
        ({"resources": '"{\\"gateway\\": 1}"'}, None),
        ({"resources": "'{\"gateway\": 1}'"}, None),
        ({"resources": '{"gateway": 1}'}, None),
        ({"resources": '"{\\"gateway\\": 1"'}, "resources"),
        ({"resources": '"{gateway: 1}"'}, "resources"),
        ({"resources": '"[1]"'}, "resources"),
        ({"resources": '"{\\"gateway\\": \\"1\\"}"'}, "resources"),
        ({"resources": '{"gateway": -1}'}, "resources"),
        ({"resources": '{"gateway": true}'}, "resources"),
    ],
)
def test_start_parameters(parameters: dict[str, str], path: str | None) -> None:
    spec = {"headGroupSpec": {}, "workerGroupSpecs": [{"rayStartParams": {}}, {"rayStartParams": parameters}]}
    found = texts_of({"kind": "RayCluster", "metadata": {"name": "r"}, "spec": spec})
    assert [where for where, _ in found] == ([f"spec.workerGroupSpecs[1].rayStartParams.{path}"] if path else [])
    head = texts_of({"kind": "RayCluster", "metadata": {"name": "r"}, "spec": {"headGroupSpec": {"rayStartParams": parameters}}})
    assert len(head) == len(found)


@pytest.mark.parametrize(("text", "valid"), [('{"a": 1}', True), ('{"a": 1', False), ("a", False)])
def test_resources_of_a_jobs_entrypoint(text: str, valid: bool) -> None:
    found = texts_of({"kind": "RayJob", "metadata": {"name": "j"}, "spec": {"entrypointResources": text}})
    assert [path for path, _ in found] == ([] if valid else ["spec.entrypointResources"])


# Recipes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"recipe.yaml": "extends: laptop\n"}, None),
        ({"recipe.yaml": "extends: base.yaml\n", "base.yaml": "extends: laptop\n"}, None),
        ({"recipe.yaml": "extends: nothing\n"}, "No recipe 'nothing'"),
        ({"recipe.yaml": "extends: laptop\ntrain: {stepps: 5}\n"}, "stepps"),
        ({"recipe.yaml": "extends: laptop\ntrain: {steps: many}\n"}, "steps"),
        ({"recipe.yaml": "extends: [\n"}, "is not valid YAML"),
        ({"recipe.yaml": "text"}, "not sections"),
        ({"other.yaml": "train: {stepps: 5}\n"}, None),
    ],
)
def test_recipes_in_config_maps(data: dict[str, str], message: str | None) -> None:
    found = [(finding.path, finding.message) for finding in recipes.findings(config_map(**data))]
    assert [path for path, _ in found] == (["data.recipe.yaml"] if message else [])
    assert message is None or message in found[0][1]
    assert "/tmp" not in str(found)


def job(entrypoint: str, mounted: str = "/etc/strata", **volume: Any) -> list[Document]:
    container = {"name": "head", "volumeMounts": [{"name": "v", "mountPath": mounted}]}
    pod = {"containers": [container], "volumes": [{"name": "v", **(volume or {"configMap": {"name": "m"}})}]}
    spec = {"entrypoint": entrypoint, "rayClusterSpec": {"headGroupSpec": {"template": {"spec": pod}}}}
    return [{"kind": "RayJob", "metadata": {"name": "j"}, "spec": spec}, config_map(**{"recipe.yaml": "", "deep": ""})]


TRAIN = "strata train --recipe /etc/strata/recipe.yaml --run demo"


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (job(TRAIN), None),
        (job(TRAIN.replace("--recipe ", "--recipe=")), None),
        (job(TRAIN, "/etc"), "ConfigMap m has no file strata/recipe.yaml"),
        (job(TRAIN.replace("recipe.yaml", "other.yaml")), "ConfigMap m has no file other.yaml"),
        (job(TRAIN, "/mnt"), "no volume is mounted at /etc/strata/recipe.yaml in the container head"),
        (job(TRAIN, "/etc/strata-2"), "no volume is mounted"),
        (job(TRAIN, nfs={}), None),
        (job(TRAIN, configMap={"name": "m", "items": [{"key": "deep", "path": "recipe.yaml"}]}), None),
        (job(TRAIN, configMap={"name": "m", "items": [{"key": "deep", "path": "deep"}]}), "ConfigMap m has no file recipe.yaml"),
        (job("strata train --recipe 8xh100"), None),
        (job("strata train --recipe 8xh1000"), "there is no built-in recipe '8xh1000'"),
        (job("python other.py --recipe nothing"), None),
        (job("strata train --recipe 'x"), "is not a shell command"),
        (job(""), "is not set: the job has no command"),
    ],
)
def test_recipes_of_jobs(documents: list[Document], message: str | None) -> None:
    found = list(recipes.of_jobs(documents))
    assert [(document["kind"], finding.path) for document, finding in found] == (
        [("RayJob", "spec.entrypoint")] if message else []
    )
    assert message is None or message in found[0][1].message


# Prometheus rules

RULE = {"alert": "Slow", "expr": "rate(x_total[5m]) > 1", "for": "5m", "annotations": {"summary": "{{ $value }} is slow"}}


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({}, None, ""),
        ({"for": "1h30m", "keep_firing_for": "1d"}, None, ""),
        ({"expr": "rate(x_total[5m] > 1"}, "expr", "is not valid PromQL"),
        ({"expr": ""}, "expr", "is not valid PromQL"),
        ({"expr": "sum by (le, (x)"}, "expr", "is not valid PromQL"),
        ({"for": "5 minutes"}, "for", "is not a duration"),
        ({"for": ""}, "for", "is not a duration"),
        ({"record": "a:b"}, "", "either alert or record"),
        ({"alert": None}, "", "either alert or record"),
        ({"alert": None, "record": "a-b"}, "record", "not a metric's name"),
        ({"labels": {"a-b": "c"}}, "labels.a-b", "not a label's name"),
        ({"annotations": {"summary": "{{ $value is slow"}}, "annotations.summary", "without an end"),
    ],
)
@pytest.mark.parametrize("kind", ["PrometheusRule", "Rules", "ClusterRules"])
def test_rules_of_prometheus(kind: str, change: Document, path: str | None, message: str) -> None:
    groups = [
        {
            "name": "g",
            "interval": "30s",
            "rules": [RULE, {key: value for key, value in (RULE | change).items() if value is not None}],
        }
    ]
    document = {"kind": kind, "metadata": {"name": "r"}, "spec": {"groups": groups}}
    found = [(finding.path, finding.message) for finding in prometheus_rules.findings(document)]
    where = "spec.groups[0].rules[1]" + (f".{path}" if path else "")
    assert [each for each, _ in found] == ([where] if path is not None else [])
    assert path is None or message in found[0][1]


@pytest.mark.parametrize(("pattern", "valid"), [("a|b.*", True), ("(?i)abc", True), ("a(b", False), ("[", False), ("*", False)])
def test_patterns_of_monitors(pattern: str, valid: bool) -> None:
    for kind, endpoints, relabeling in (
        ("PodMonitor", "podMetricsEndpoints", "metricRelabelings"),
        ("PodMonitoring", "endpoints", "metricRelabeling"),
    ):
        spec = {endpoints: [{"port": "a"}, {relabeling: [{"action": "keep", "regex": pattern}]}]}
        found = [finding.path for finding in prometheus_rules.findings({"kind": kind, "metadata": {"name": "m"}, "spec": spec})]
        assert found == ([] if valid else [f"spec.{endpoints}[1].{relabeling}[0].regex"])


@pytest.mark.parametrize(("text", "valid"), [("30s", True), ("1m30s", True), ("30 sec", False), ("1.5s", False)])
def test_intervals_of_monitors(text: str, valid: bool) -> None:
    for kind, endpoints, field in (
        ("PodMonitor", "podMetricsEndpoints", "scrapeTimeout"),
        ("PodMonitoring", "endpoints", "interval"),
    ):
        document = {"kind": kind, "metadata": {"name": "m"}, "spec": {endpoints: [{"port": "a", field: text}]}}
        found = [finding.path for finding in prometheus_rules.findings(document)]
        assert found == ([] if valid else [f"spec.{endpoints}[0].{field}"])


def test_groups_of_rules() -> None:
    twice = {
        "kind": "Rules",
        "metadata": {"name": "r"},
        "spec": {"groups": [{"name": "g", "interval": "x", "rules": []}, {"name": "g"}]},
    }
    assert [finding.path for finding in prometheus_rules.findings(twice)] == ["spec.groups", "spec.groups[0].interval"]


def test_rule_files_in_config_maps() -> None:
    text = "groups:\n- name: g\n  rules:\n  - {record: a, expr: sum(}\n"
    found = [finding.path for finding in prometheus_rules.findings(config_map(**{"r.yaml": text}))]
    assert found == ["data.r.yaml.groups[0].rules[0].expr"]
    other = {"a.yaml": "groups: 3\n", "b.yaml": "groups: [x]\n", "c.yaml": "groups: [\n", "d.txt": text}
    assert list(prometheus_rules.findings(config_map(**other))) == []


def test_our_own_rules_are_valid() -> None:
    files = {file.name: file.read_text() for file in (ROOT / "infra/prometheus/rules").glob("*.yaml")}
    assert files
    assert list(prometheus_rules.findings(config_map(**files))) == []
