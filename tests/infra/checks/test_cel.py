"""CEL rules of CRDs: evaluation on new objects, escapes, messages, and every rule of the pinned definitions."""

from typing import Any

import pytest
import yaml

from .crd import FOLDER, needs

pytest.importorskip("cel_expr_python")

from strata.deploy.checks import schemas
from strata.deploy.checks.crds import cel
from strata.deploy.documents import KubernetesLoader

Document = dict[str, Any]


def rules(*expressions: str, **schema: Any) -> Document:
    return {"x-kubernetes-validations": [{"rule": each, "message": f"breaks {each}"} for each in expressions], **schema}


def broken(schema: Document, value: Any) -> list[tuple[str, str]]:
    return [(finding.path, finding.message) for finding in cel.findings(schema, value)]


@pytest.mark.parametrize(
    ("rule", "value", "holds"),
    [
        ("has(self.a) != has(self.b)", {"a": 1}, True),
        ("has(self.a) != has(self.b)", {"a": 1, "b": 1}, False),
        ("self.all(x, self.exists_one(y, x.name == y.name))", [{"name": "a"}, {"name": "b"}], True),
        ("self.all(x, self.exists_one(y, x.name == y.name))", [{"name": "a"}, {"name": "a"}], False),
        ("self.a <= self.b", {"a": 1, "b": 1}, True),
        ("self.a <= self.b", {"a": 2, "b": 1}, False),
        ("self.a <= self.b", {"a": 2}, False),  # an error counts as a violation
        ("self == oldSelf", {"a": 1}, True),  # about a change of an object
        ("self.matches('^[a-z]+$')", "ab", True),
        ("self.matches('^[a-z]+$')", "aB", False),
        ("self.split('/')[0] == 'a'", "a/b", True),
        ("isURL(self)", "https://example.com/x", True),
        ("isURL(self)", "example", False),
        ("size(self) < 2", "ä", True),
    ],
)
def test_rules_of_new_objects(rule: str, value: Any, holds: bool) -> None:
    assert (broken(rules(rule), value) == []) is holds


def test_rules_are_found_at_every_level() -> None:
    inner = rules("self > 0", type="integer")
    schema: Document = {
        "properties": {
            "one": inner,
            "list": {"items": {"properties": {"in": inner}}},
            "map": {"additionalProperties": inner},
        }
    }
    value = {"one": 0, "list": [{"in": 1}, {"in": 0}], "map": {"x": 0}, "unknown": 0}
    assert [path for path, _ in broken(schema, value)] == ["one", "list[1].in", "map.x"]
    assert broken(schema, {"one": 1, "list": [], "map": {}}) == []


def test_field_names_are_escaped_and_keys_of_maps_are_not() -> None:
    names = {name: {"type": "string"} for name in ("namespace", "a-b", "c.d", "e/f", "g__h")}
    rule = "self.__namespace__ + self.a__dash__b + self.c__dot__d + self.e__slash__f + self.g__underscores__h == '12345'"
    value = dict(zip(names, "12345", strict=True))
    assert broken(rules(rule, properties=names), value) == []
    assert broken(rules("'a-b' in self && 'namespace' in self", additionalProperties={}), {"a-b": 1, "namespace": 2}) == []


def test_messages_and_paths_of_rules() -> None:
    plain = {"x-kubernetes-validations": [{"rule": "self.a > 1"}]}
    assert broken(plain, {"a": 1}) == [("", "violates 'self.a > 1'")]
    written = {"rule": "self.a > 1", "messageExpression": "'a is ' + string(self.a)", "message": "other", "fieldPath": ".a"}
    schema = {"properties": {"spec": {"x-kubernetes-validations": [written]}}}
    assert broken(schema, {"spec": {"a": 1}}) == [("spec.a", "a is 1")]


def test_rules_with_functions_of_kubernetes_are_listed_and_not_evaluated() -> None:
    schema = rules("cidr(self).containsIP('10.0.0.1')", "self != ''")
    assert broken(schema, "10.0.0.0/8") == []
    assert cel.unsupported(schema, "10.0.0.0/8") == ["cidr(self).containsIP('10.0.0.1')"]
    assert cel.unsupported(rules("self == oldSelf"), 1) == []


@needs("kueue.x-k8s.io_clusterqueues", "gateway.networking.k8s.io_httproutes", "monitoring.googleapis.com_podmonitorings")
def test_every_rule_of_the_fetched_definitions_can_be_evaluated() -> None:
    assert FOLDER is not None
    found = set()

    def collect(node: Any) -> None:
        for rule in node.get("x-kubernetes-validations") or []:
            found.add(rule["rule"])
        for below in [*(node.get("properties") or {}).values(), node.get("items"), node.get("additionalProperties")]:
            if isinstance(below, dict):
                collect(below)

    for file in FOLDER.glob("[!r]*.yaml"):  # KubeRay's are large, and have no rules that others lack
        for version in yaml.load(file.read_text(), Loader=KubernetesLoader)["spec"]["versions"]:
            collect(version["schema"]["openAPIV3Schema"])
    assert len(found) > 50
    schema = rules(*found)
    assert cel.unsupported(schema, {}) == []


QUEUE: Document = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "ClusterQueue",
    "metadata": {"name": "q"},
    "spec": {
        "namespaceSelector": {},
        "resourceGroups": [
            {"coveredResources": ["cpu"], "flavors": [{"name": "f", "resources": [{"name": "cpu", "nominalQuota": "1"}]}]}
        ],
    },
}


@needs("kueue.x-k8s.io_clusterqueues")
def test_a_rule_of_kueue() -> None:
    assert list(schemas.findings(QUEUE, FOLDER)) == []
    group = {**QUEUE["spec"]["resourceGroups"][0], "coveredResources": ["cpu", "memory"]}
    [finding] = schemas.findings({**QUEUE, "spec": {"resourceGroups": [group]}}, FOLDER)
    assert finding.path == "spec.resourceGroups[0]"
    assert "coveredResources" in finding.message
