"""Schemas of built-in kinds and of CRDs: unknown fields, types, defaults, list keys and versions."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from strata.deploy import validate
from strata.deploy.checks import core, schemas
from strata.deploy.checks.crds import structural

from .crd import box, definition

Document = dict[str, Any]

ITEM = {"port": {"type": "integer"}, "protocol": {"type": "string", "default": "TCP"}, "x": {"type": "integer"}}
SPEC: Document = {
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$"},
        "mode": {"type": "string", "enum": ["On", "Off"]},
        "note": {"type": "string", "nullable": True},
        "size": {"x-kubernetes-int-or-string": True},
        "narrow": {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}]},
        "free": {"type": "object", "properties": {"a": {"type": "integer"}}, "x-kubernetes-preserve-unknown-fields": True},
        "map": {"type": "object", "additionalProperties": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        "empty": {"type": "object"},
        "object": {"type": "object", "x-kubernetes-embedded-resource": True, "properties": {"spec": {"type": "object"}}},
        "bare": {
            "type": "array",
            "x-kubernetes-list-map-keys": ["name"],
            "items": {"x-kubernetes-preserve-unknown-fields": True},
        },
        "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
        "list": {
            "type": "array",
            "x-kubernetes-list-map-keys": ["port", "protocol"],
            "items": {"type": "object", "properties": ITEM},
        },
        "small": {"type": "integer", "format": "int32"},
        "large": {"type": "integer", "format": "int64"},
        "positive": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
        "natural": {"type": "integer", "minimum": 0, "exclusiveMinimum": False},
    },
}


@pytest.fixture
def crds(tmp_path: Path) -> Path:
    (tmp_path / "crd.yaml").write_text(definition(SPEC, v1=True, v1alpha1=False))
    return tmp_path


def paths(document: Document, crds: Path) -> list[str]:
    return [finding.path for finding in schemas.findings(document, crds)]


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({}, None),
        ({"nam": 1}, "spec"),
        ({"name": None}, "spec"),  # dropped by the server, so a required field is missing
        ({"name": "A"}, "spec.name"),
        ({"mode": "On"}, None),
        ({"mode": "on"}, "spec.mode"),
        ({"mode": None}, None),
        ({"note": None}, None),
        ({"note": 1}, "spec.note"),
        ({"size": 1}, None),
        ({"size": "1"}, None),
        ({"size": 1.5}, "spec.size"),
        ({"narrow": 1}, None),
        ({"narrow": "1"}, "spec.narrow"),
        ({"free": {"b": 1}}, None),
        ({"free": {"a": "1"}}, "spec.free.a"),
        ({"map": {"x": {"a": 1}}}, None),
        ({"map": {"x": {"b": 1}}}, "spec.map.x"),
        ({"empty": {}}, None),
        ({"empty": {"a": 1}}, "spec.empty"),
        ({"object": {"apiVersion": "v1", "kind": "A", "metadata": {"name": "a"}, "spec": {}}}, None),
        ({"object": {"status": {}}}, "spec.object"),
        ({"list": [{"port": 1}, {"port": 2}]}, None),
        ({"list": [{"port": 1}, {"port": 1, "protocol": "UDP"}]}, None),
        ({"list": [{"port": 1, "x": 1}, {"port": 1, "protocol": "TCP", "x": 2}]}, "spec.list[1]"),
        ({"list": [{"prt": 1}]}, "spec.list[0]"),
        ({"list": "x"}, "spec.list"),
        ({"bare": [{"name": "a"}, {"name": "b"}, {}, 1]}, None),
        ({"bare": [{"name": "a"}, {"name": "a"}]}, "spec.bare[1]"),
        ({"set": ["a", "b"]}, None),
        ({"set": ["a", "b", "a"]}, "spec.set[2]"),
        ({"small": 2**31 - 1}, None),
        ({"small": 2**31}, "spec.small"),
        ({"small": -(2**31)}, None),
        ({"small": -(2**31) - 1}, "spec.small"),
        ({"large": 2**31}, None),
        ({"large": 2**63}, "spec.large"),
        ({"positive": 0}, "spec.positive"),
        ({"positive": 1}, None),
        ({"natural": 0}, None),
        ({"natural": -1}, "spec.natural"),
    ],
)
def test_a_definition_forbids_unknown_fields_and_other_types(crds: Path, spec: Document, path: str | None) -> None:
    assert paths(box({"name": "x", **spec}), crds) == ([path] if path else [])


@pytest.mark.parametrize(
    ("metadata", "path"),
    [
        ({"labels": {"a": 1}}, "metadata.labels.a"),
        ({"annotations": {"a": True}}, "metadata.annotations.a"),
        ({"lables": {"a": "b"}}, "metadata"),
        ({"namespace": 1}, "metadata.namespace"),
        ({"labels": {"a": "b"}, "annotations": {"c": "d"}, "namespace": "n", "finalizers": ["f"]}, None),
    ],
)
def test_metadata_has_the_servers_schema(crds: Path, metadata: Document, path: str | None) -> None:
    document = box({"name": "x"}, metadata={"name": "a", **metadata})
    assert paths(document, crds) == ([path] if path else [])


def test_unknown_fields_beside_spec(crds: Path) -> None:
    assert paths(box({"name": "x"}, sepc={}), crds) == [""]


def test_only_served_versions_have_a_schema(crds: Path) -> None:
    [finding] = schemas.findings(box({"name": "x"}, apiVersion="example.com/v1alpha1"), crds)
    assert finding.path == "apiVersion"
    assert finding.message == f"example.com/v1alpha1 Box is not defined by the CRDs in {crds}, but by example.com/v1"


def test_a_misspelled_kind_of_a_known_group_is_wrong_and_others_are_not_checked(crds: Path) -> None:
    (crds / "second.yaml").write_text(definition(SPEC, kind="PodMonitoring"))
    [finding] = schemas.findings(box({}, kind="PodMonitorin"), crds)
    assert (finding.path, finding.message) == ("kind", "example.com has no kind PodMonitorin, but PodMonitoring")
    for unknown in (box({}, kind="ClusterPodMonitoring"), box({}, apiVersion="example.org/v1")):
        assert paths(unknown, crds) == []
        assert not schemas.has_schema(unknown, crds)
        assert not schemas.has_schema(unknown, None)
    assert schemas.has_schema(box({}), crds)


def test_a_folder_with_kuberays_definitions_only(tmp_path: Path) -> None:
    (tmp_path / "ray.io_rayjobs.yaml").write_text(definition({}, "RayJob", "ray.io"))
    job, monitor = (
        box({}, apiVersion="ray.io/v1", kind="RayJob"),
        box({}, apiVersion="monitoring.coreos.com/v1", kind="PodMonitor"),
    )
    assert schemas.has_schema(job, tmp_path) and not schemas.has_schema(monitor, tmp_path)
    assert validate.problems([monitor], tmp_path) == []
    assert [problem.path for problem in validate.problems([{**job, "spec": {"a": 1}}], tmp_path)] == ["spec"]


def test_a_file_may_hold_several_definitions(tmp_path: Path) -> None:
    both = definition(SPEC, kind="Other") + "---\n" + definition(SPEC) + "---\n{}\n---\nkind: ConfigMap\n"
    (tmp_path / "all.yaml").write_text(both)
    assert paths(box({}), tmp_path) == ["spec"]


def test_an_equals_sign_and_a_date_are_strings(tmp_path: Path) -> None:
    spec = {"properties": {"operator": {"type": "string", "enum": ["=", "2026-01-01"]}}}
    (tmp_path / "crd.yaml").write_text(definition(spec).replace("'='", "=").replace("'2026-01-01'", "2026-01-01"))
    assert "- =\n" in (tmp_path / "crd.yaml").read_text()
    assert paths(box({"operator": "="}), tmp_path) == paths(box({"operator": "2026-01-01"}), tmp_path) == []
    assert paths(box({"operator": "!="}), tmp_path) == ["spec.operator"]


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("^[a-z]+$", "abc", True),
        ("^[a-z]+$", "abc\n", False),
        ("^(?i)(abc)?$", "ABC", True),
        ("^(?i)(abc)?$", "ABD", False),
        ("(?i)^a|b$", "B", True),
        ("^a\\$", "a$x", True),
        ("b", "abc", True),
    ],
)
def test_patterns_are_gos(tmp_path: Path, pattern: str, text: str, matches: bool) -> None:
    (tmp_path / "crd.yaml").write_text(definition({"properties": {"text": {"type": "string", "pattern": pattern}}}))
    assert paths(box({"text": text}), tmp_path) == ([] if matches else ["spec.text"])


def test_defaults_are_applied_before_validation() -> None:
    schema: Document = {
        "properties": {
            "a": {"default": {"b": None}, "properties": {"b": {"type": "integer", "default": 2}}},
            "list": {"items": {"properties": {"c": {"default": "x"}}}},
            "map": {"additionalProperties": {"properties": {"d": {"default": True}}}},
            "set": {"default": 1},
        }
    }
    given: Document = {"list": [{}, {"c": "y"}], "map": {"m": {}}, "set": 3, "other": None}
    expected = {"list": [{"c": "x"}, {"c": "y"}], "map": {"m": {"d": True}}, "set": 3, "other": None, "a": {"b": 2}}
    assert structural.defaulted(schema, given) == expected
    assert structural.defaulted(schema, {"set": None})["set"] == 1
    assert given["list"] == [{}, {"c": "y"}], "the object itself is unchanged"


# Built-in kinds


@pytest.mark.parametrize(
    ("api_version", "kind", "built_in", "known"),
    [
        ("v1", "ConfigMap", True, True),
        ("v1", "configmap", True, False),
        ("apps/v1", "Deployment", True, True),
        ("apps/v1", "Deploymnt", True, False),
        ("networking.k8s.io/v1", "NetworkPolicy", True, True),
        ("networking.k8s.io/v1", "IPBlock", True, False),  # a part of an object
        ("networking.gke.io/v1", "NetworkPolicy", False, False),
        ("scheduling.k8s.io/v1", "PriorityClass", True, True),
        ("scheduling.volcano.sh/v1beta1", "PodGroup", False, False),
        ("gateway.networking.k8s.io/v1", "Gateway", False, False),
        ("kueue.x-k8s.io/v1beta2", "ClusterQueue", False, False),
        ("policy/v1beta1", "PodDisruptionBudget", True, False),  # removed
        ("v2", "ConfigMap", True, False),
    ],
)
def test_built_in_kinds_by_group_and_kind(api_version: str, kind: str, built_in: bool, known: bool) -> None:
    assert (core.is_built_in(api_version), core.knows(api_version, kind)) == (built_in, known)
    document = {"apiVersion": api_version, "kind": kind, "metadata": {"name": "a"}}
    expected = [f"Kubernetes has no kind {kind} in {api_version}"] if built_in and not known else []
    assert [finding.message for finding in schemas.findings(document, None) if finding.path == "kind"] == expected


def test_all_errors_of_a_built_in_kind_are_found() -> None:
    document = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"prt": 1}], "type": 1}}
    assert [finding.path for finding in core.findings(document)] == ["spec.ports[0]", "spec.ports[0]", "spec.type"]


# Order of the checks


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}}, []),
        ({"kind": "Secret", "metadata": {"name": "a"}}, ["apiVersion"]),
        ({"apiVersion": 1, "metadata": {"name": "a"}}, ["apiVersion", "kind"]),
        ({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": 1}}, ["metadata.name"]),
        ({"apiVersion": "v1", "kind": "Secret", "metadata": "a"}, ["metadata.name"]),
        ({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}, "dat": {}}, [""]),
    ],
)
def test_required_fields_are_checked_before_the_schema(document: Document, expected: list[str]) -> None:
    assert [problem.path for problem in validate.problems([document], None)] == expected


def test_rules_and_references_are_checked_only_if_the_schemas_are_met() -> None:
    """A RayJob without a cluster breaks a rule of the operator; the Secret breaks its schema."""
    job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "a"}, "spec": {}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}}
    assert [str(each) for each in validate.problems([job, secret], None)] == [
        "RayJob/a: spec.rayClusterSpec: must be set, or clusterSelector"
    ]
    assert [each.object for each in validate.problems([job, {**secret, "dat": {}}], None)] == ["Secret/a"]
    assert [str(each) for each in validate.problems([secret, secret], None)] == ["Secret/a: metadata.name: Secret/a occurs twice"]


@pytest.mark.parametrize("spec", ["text", {"selector": "text"}, {"selector": {"matchLabels": [1]}}])
def test_a_malformed_object_without_a_schema_is_wrong(spec: Any) -> None:
    monitor = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": {"name": "m"}, "spec": spec}
    [problem] = validate.problems([monitor], None)
    assert (problem.object, problem.path) == ("PodMonitor/m", "spec")
    assert "set --crds to find it" in problem.message


def test_a_schema_finds_what_is_malformed(tmp_path: Path) -> None:
    crd = yaml.safe_load(definition({"properties": {"selector": {"type": "object"}}}, "PodMonitor", "monitoring.coreos.com"))
    (tmp_path / "crd.yaml").write_text(yaml.safe_dump(crd))
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "m"},
        "spec": {"selector": "x"},
    }
    [problem] = validate.problems([monitor], tmp_path)
    assert (problem.path, problem.message) == ("spec.selector", "'x' is not of type 'object'")
