"""Random mutations of rendered objects: each one is refused, with the object's name and the place."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.deploy import documents, render, validate
from strata.deploy.checks.crds import definitions
from strata.deploy.problem import dotted
from strata.deploy.render import Order
from strata.platform import recipe_file

from .crd import FOLDER, definition

Document = dict[str, Any]
Steps = tuple[str | int, ...]

QUICK = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
SLOW = ("RayJob", "RayService")
COMPONENTS = ("kueue", "monitoring-gke", "network-policy", "grafana")


@lru_cache
def rendered() -> list[Document]:
    recipe = recipe_file.load("8xh100", ["deploy.gpu=h100", "deploy.storage=bucket"])
    return render.render(Order("gke", recipe, "demo", COMPONENTS, image="example.com/strata:1.0"))


def at(node: Any, steps: Steps) -> Any:
    for step in steps:
        node = node[step]
    return node


# Mutations of a single object, by its schema

QUANTITY = {"x-kubernetes-int-or-string": True, "pattern": r"^[0-9.]+(m|k|[KMGTPE]i?)?$"}
RESOURCE = {"required": ["name", "nominalQuota"], "properties": {"name": {"type": "string"}, "nominalQuota": QUANTITY}}
FLAVOR = {
    "required": ["name", "resources"],
    "properties": {"name": {"type": "string"}, "resources": {"type": "array", "items": {"type": "object", **RESOURCE}}},
}
GROUP = {
    "required": ["coveredResources", "flavors"],
    "properties": {
        "coveredResources": {"type": "array", "items": {"type": "string"}},
        "flavors": {"type": "array", "items": {"type": "object", **FLAVOR}},
    },
}
QUEUE = {
    "properties": {
        "namespaceSelector": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "queueingStrategy": {"type": "string", "enum": ["StrictFIFO", "BestEffortFIFO"], "default": "BestEffortFIFO"},
        "resourceGroups": {"type": "array", "items": {"type": "object", **GROUP}},
        "cohortName": {"type": "string"},
    },
    "x-kubernetes-preserve-unknown-fields": True,
}


@pytest.fixture(scope="module")
def crds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fetched definitions, or a hand-written one."""
    if FOLDER is not None:
        return FOLDER
    folder = tmp_path_factory.mktemp("crds")
    (folder / "queue.yaml").write_text(definition(QUEUE, "ClusterQueue", "kueue.x-k8s.io", v1beta2=True))
    return folder


@dataclass(frozen=True)
class Mutation:
    kind: str
    place: Steps  # of the changed or removed value
    apply: Callable[[Any], Any]  # changes the value that holds it

    def __repr__(self) -> str:
        return f"{self.kind} at {self.place}"


def mutations(schema: Document, value: Any, steps: Steps) -> Iterator[Mutation]:
    """Mutations of a value that its schema forbids."""

    def put(step: str | int, new: Any) -> Callable[[Any], Any]:
        return lambda node: node.__setitem__(step, new)

    def drop(step: str | int) -> Callable[[Any], Any]:
        return lambda node: node.__delitem__(step)

    if isinstance(value, dict):
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
        if properties and not schema.get("x-kubernetes-preserve-unknown-fields"):
            yield Mutation("unknown field", (*steps, "unknownField"), put("unknownField", 1))
        for name in schema.get("required") or []:
            if name in value and "default" not in properties.get(name, {}):
                yield Mutation("missing field", (*steps, name), drop(name))
        inside = [(name, properties.get(name, others)) for name in value]
    else:
        inside = [(i, schema.get("items")) for i in range(len(value))] if isinstance(value, list) else []
    for step, below in inside:
        if not isinstance(below, dict) or (*steps, step) in (("apiVersion",), ("kind",), ("metadata",)):
            continue
        place = (*steps, step)
        if "type" in below or below.get("x-kubernetes-int-or-string"):
            yield Mutation("wrong type", place, put(step, "text" if below.get("type") in ("object", "array") else [["text"]]))
        if "enum" in below:
            yield Mutation("bad enum", place, put(step, "NotAChoice"))
        if below.get("x-kubernetes-int-or-string") and "pattern" in below:
            yield Mutation("bad quantity", place, put(step, "1 Gi"))
        yield from mutations(below, value[step], place)


@lru_cache
def schema_mutations(crds: Path) -> list[tuple[int, list[Mutation]]]:
    """Mutations of each rendered object whose kind the folder defines. Of KubeRay's, which are slow to parse, one."""
    found = []
    for i, document in enumerate(rendered()):
        group, version = document["apiVersion"].rpartition("/")[::2]
        if document["kind"] not in SLOW and version in (served := definitions.served(crds, group, document["kind"])):
            found.append((i, list(mutations(served[version], document, ()))))
    return found


@QUICK
@given(data=st.data())
def test_mutations_that_a_schema_forbids(crds: Path, data: st.DataObject) -> None:
    i, candidates = data.draw(st.sampled_from(schema_mutations(crds)))
    kind = data.draw(st.sampled_from(sorted({each.kind for each in candidates})))
    mutation = data.draw(st.sampled_from([each for each in candidates if each.kind == kind]))
    document = copy.deepcopy(rendered()[i])
    mutation.apply(at(document, mutation.place[:-1]))
    found = validate.problems([document], crds)
    assert found, mutation
    assert {problem.object for problem in found} == {documents.title(rendered()[i])}
    holder = dotted(mutation.place[:-1])
    assert any(problem.path.startswith(holder) for problem in found), (mutation, found)


# Mutations of any object


def long_label(document: Document) -> None:
    document["metadata"].setdefault("labels", {})["example.com/label"] = "x" * 64


ANY: dict[str, Callable[[Document], Any]] = {
    "unknown field": lambda document: document.update(specification={}),
    "label of another type": lambda document: document["metadata"].update(labels={"a": 1}),
    "annotation of another type": lambda document: document["metadata"].update(annotations={"a": True}),
    "name with capitals": lambda document: document["metadata"].update(name="Not-a-Name"),
    "long label": long_label,
    "label with a space": lambda document: document["metadata"].update(labels={"a": "b c"}),
    "broken JSON": lambda document: document["metadata"].update(annotations={"example.com/x": '{"a": '}),
}


@QUICK
@given(data=st.data())
def test_mutations_of_any_object(crds: Path, data: st.DataObject) -> None:
    checked = [document for document in rendered() if document["kind"] not in SLOW]
    checked = [document for document in checked if validate.has_schema(document, crds)]
    document = copy.deepcopy(data.draw(st.sampled_from(checked)))
    ANY[data.draw(st.sampled_from(sorted(ANY)))](document)
    assert documents.title(document) in {problem.object for problem in validate.problems([document], crds)}


def test_a_misspelled_kind_or_version_is_wrong(crds: Path) -> None:
    by_kind = {document["kind"]: document for document in rendered() if document["kind"] not in SLOW}
    for each in [document for document in by_kind.values() if validate.has_schema(document, crds)]:
        kind, version = {**each, "kind": f"{each['kind']}s"}, {**each, "apiVersion": f"{each['apiVersion']}gamma9"}
        assert {problem.path for problem in validate.problems([kind], crds)} == {"kind"}
        assert {problem.path for problem in validate.problems([version], crds)} <= {"kind", "apiVersion"} != set()


# Mutations that only other checks find: places by object, and a change of each place

Place = tuple[int, Steps]


def places(wanted: Callable[[Document, Steps, Any], bool]) -> list[Place]:
    found: list[Place] = []

    def walk(i: int, node: Any, steps: Steps) -> None:
        if wanted(rendered()[i], steps, node):
            found.append((i, steps))
        for step, below in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            walk(i, below, (*steps, step))

    for i in range(len(rendered())):
        walk(i, rendered()[i], ())
    return found


def ends(*names: str | int) -> Callable[[Document, Steps, Any], bool]:
    return lambda _, steps, node: steps[-len(names) :] == names


def of_kind(kind: str, *names: str | int) -> Callable[[Document, Steps, Any], bool]:
    return lambda document, steps, _: document["kind"] == kind and steps[-len(names) :] == names


def label(name: str) -> Callable[[Document, Steps, Any], bool]:
    return lambda document, steps, _: steps == ("metadata", "labels", name)


def data_key(suffix: str) -> Callable[[Document, Steps, Any], bool]:
    return lambda document, steps, _: (
        document["kind"] == "ConfigMap" and steps[:1] == ("data",) and str(steps[-1]).endswith(suffix)
    )


def is_limits(_: Document, steps: Steps, node: Any) -> bool:
    return steps[-1:] == ("limits",) and "containers" in steps and "cpu" in node


def renamed(name: str) -> str:
    return f"{name}-missing"


def with_first_again(items: list[Any]) -> list[Any]:
    return [*items, items[0]]


OTHERS: dict[str, tuple[Callable[[Document, Steps, Any], bool], Callable[[Any], Any]]] = {
    "dangling ConfigMap": (ends("configMap", "name"), renamed),
    "dangling ServiceAccount": (ends("serviceAccountName"), renamed),
    "dangling claim": (ends("claimName"), renamed),
    "dangling queue": (label("kueue.x-k8s.io/queue-name"), renamed),
    "dangling ClusterQueue": (of_kind("LocalQueue", "clusterQueue"), renamed),
    "dangling flavor": (of_kind("ClusterQueue", "flavors", 0, "name"), renamed),
    "mount without a volume": (ends("volumeMounts", 0, "name"), renamed),
    "variable twice": (ends("env"), with_first_again),
    "port twice": (lambda _, steps, node: steps[-1:] == ("ports",) and "containers" in steps, with_first_again),
    "volume twice": (lambda _, steps, node: steps[-1:] == ("volumes",), with_first_again),
    "request over the limit": (is_limits, lambda limits: {**limits, "cpu": "1m"}),
    "bad quantity": (is_limits, lambda limits: {**limits, "memory": "16GB"}),
    "part of a GPU": (is_limits, lambda limits: {**limits, "nvidia.com/gpu": "500m"}),
    "image without a tag": (lambda _, steps, node: steps[-1:] == ("image",) and "containers" in steps, lambda _: "strata"),
    "label of a node": (ends("nodeSelector"), lambda _: {"a": "b c"}),
    "quota too small": (of_kind("ClusterQueue", "resources", 0, "nominalQuota"), lambda _: "1"),
    "budget without pods": (of_kind("PodDisruptionBudget", "selector", "matchLabels"), lambda labels: {**labels, "a": "b"}),
    "monitor without pods": (
        lambda document, steps, node: (
            document["kind"] == "PodMonitoring" and steps == ("spec", "selector") and "ray.io" in str(node)
        ),
        lambda _: {"matchLabels": {"ray.io/group": "none"}},
    ),
    "capability": (
        lambda _, steps, node: steps[-1:] == ("capabilities",) and "containers" in steps,
        lambda _: {"add": ["SYS_ADMIN"]},
    ),
    "serve: broken YAML": (ends("serveConfigV2"), lambda text: text + "\n  bad: [\n"),
    "serve: no applications": (ends("serveConfigV2"), lambda text: text.replace("applications", "applicatons")),
    "serve: unknown field": (ends("serveConfigV2"), lambda text: text + "\nproxy: Disabled\n"),
    "serve: key twice": (ends("serveConfigV2"), lambda text: text + "\napplications: []\n"),
    "serve: no model": (ends("serveConfigV2"), lambda text: text.replace("model:", "modell:")),
    "serve: other recipe": (ends("serveConfigV2"), lambda text: text.replace("recipe.yaml", "other.yaml")),
    "serve: other application": (ends("serveConfigV2"), lambda text: text.replace("kuberay_app:", "kuberay_apps:")),
    "job: other recipe": (ends("entrypoint"), lambda text: text.replace("recipe.yaml", "other.yaml")),
    "recipe: broken YAML": (data_key("recipe.yaml"), lambda text: text + "\ntrain: [\n"),
    "recipe: unknown section": (data_key("recipe.yaml"), lambda text: text + "\nunknown_section: {a: 1}\n"),
    "recipe: wrong type": (data_key("recipe.yaml"), lambda text: text.replace("steps:", "steps: many #", 1)),
    "board: broken JSON": (data_key(".json"), lambda text: text.rstrip()[:-1]),
    "rule: broken PromQL": (of_kind("ClusterRules", "expr"), lambda text: f"({text}"),
    "rule: broken duration": (of_kind("ClusterRules", "for"), lambda _: "5 minutes"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_mutations_that_other_checks_find(name: str) -> None:
    wanted, change = OTHERS[name]

    @settings(QUICK, max_examples=4)
    @given(place=st.sampled_from(places(wanted)))
    def check(place: Place) -> None:
        i, steps = place
        objects = list(rendered())
        objects[i] = copy.deepcopy(objects[i])
        at(objects[i], steps[:-1])[steps[-1]] = change(at(objects[i], steps))
        title = documents.title(objects[i])
        found = [(title, finding.path) for finding in validate.alone(objects[i])]
        found += [(problem.object, problem.path) for problem in validate.between(objects)]
        assert found, place
        # A queue that is too small or gone is a problem of the object that waits in it.
        assert name.startswith("quota") or title in {where for where, _ in found}

    check()


def test_rendered_objects_are_valid() -> None:
    assert validate.between(rendered()) == []
    assert [finding for document in rendered() for finding in validate.alone(document)] == []
