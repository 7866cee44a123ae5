"""Names of runs, deployments and teams: nothing of one overwrites anything of another."""

import copy
import functools
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.deploy import documents, render
from strata.deploy.documents import Document
from strata.deploy.kuberay.rules import DNS_1035
from strata.deploy.render import Order
from strata.deploy.teams.scopes import LABEL_VALUE, SHARED_KINDS, place, run_label, run_name
from strata.deploy.validate import problems
from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import DeploySection
from strata.platform.runs import NAME

IMAGE = "example.com/strata:1.0"
MODEL = "deploy.model=Qwen/Qwen3-8B"  # for model-pull
RECIPES = {
    "gke": ("8xh100", ["deploy.gpu=h100", "deploy.storage=my-bucket", MODEL]),
    "ack": ("8xh100", ["deploy.gpu=h20", "deploy.storage=mine.nas.aliyuncs.com", MODEL]),
    "kind": ("laptop", [MODEL]),
}
LARGER = {
    "gke": ["parallel.workers=64", "train.batch=64", "deploy.network=tcp"],
    "ack": ["parallel.workers=64", "train.batch=64", "deploy.network=tcp"],
    "kind": [],
}
TEAMS = ("strata", "research")


@functools.cache
def components(target: str, preferred: tuple[str, ...]) -> tuple[str, ...]:
    """All components that a target and both sizes of a run accept together, the preferred ones first."""
    chosen = preferred
    for name in render.components_known():
        if name not in chosen and all(accepts(target, (*chosen, name), larger) for larger in (False, True)):
            chosen = (*chosen, name)
    return chosen


def accepts(target: str, chosen: tuple[str, ...], larger: bool) -> bool:
    """True if a rendering starts to build its manifests, before which it rejects components."""
    recipe, overrides = RECIPES[target]
    loaded = recipe_file.load(recipe, [*overrides, *(LARGER[target] if larger else [])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "build", lambda *_: [])
        try:
            render.render(Order(target, loaded, "one", chosen, None, IMAGE))
        except UserError:
            return False
    return True


@functools.cache
def rendered(
    target: str,
    preferred: tuple[str, ...],
    namespace: str,
    name: str,
    run: str,
    only: str | None,
    larger: bool,
    quota: int | None,
) -> list[Document]:
    recipe, overrides = RECIPES[target]
    overrides = [*overrides, *(LARGER[target] if larger else []), f"deploy.name={name}", f"deploy.namespace={namespace}"]
    overrides += ["deploy.borrow_gpus=64", f"deploy.quota_gpus={quota}"] if quota else []
    chosen = components(target, preferred)
    if only == "train":  # training starts from nothing that could be pulled
        chosen = tuple(each for each in chosen if each != "model-pull")
    return render.render(Order(target, recipe_file.load(recipe, overrides), run, chosen, only, IMAGE))


def side_by_side(target: str, preferred: tuple[str, ...], quota: int | None) -> dict[tuple[str, str, str], list[Document]]:
    """Three runs of two teams: an endpoint with its run, a second endpoint with a larger run, and a run alone."""
    return {
        (namespace, name, run): rendered(target, preferred, namespace, name, run, only, larger, quota)
        for namespace in TEAMS
        for name, run, only, larger in (
            ("strata", "one", None, False),
            ("second", "one", None, True),
            ("strata", "two", "train", True),
        )
    }


def key(document: Document) -> tuple[str, str | None, str]:
    return document["kind"], document["metadata"].get("namespace"), document["metadata"]["name"]


FLEX = ("kueue", "flex-start", "monitoring-gke")
CASES: list[tuple[str, tuple[str, ...], int | None]] = [("ack", ("kueue",), 64), ("kind", ("kueue",), 64)]
CASES += [
    ("gke", ("kueue", "reservation"), 64),
    ("gke", FLEX, None),
    ("gke", FLEX, 64),
    ("ack", ("volcano", "nvml", "monitoring-arms"), None),
    ("kind", ("kueue",), None),
]


@pytest.mark.parametrize(("target", "preferred", "quota"), CASES)
def test_two_teams_with_three_runs_overwrite_nothing(target: str, preferred: tuple[str, ...], quota: int | None) -> None:
    renderings = side_by_side(target, preferred, quota)
    for (one, first), (other, second) in itertools.combinations(renderings.items(), 2):
        mine, theirs = ({key(document): document for document in each} for each in (first, second))
        for each in mine.keys() & theirs.keys():
            assert mine[each] == theirs[each], f"{each} of {one} and {other}"
            kind, namespace, name = each
            if one[0] != other[0]:
                assert kind in SHARED_KINDS or (name if kind == "Namespace" else namespace) not in (*TEAMS, None), (
                    f"{each} is shared"
                )
            assert kind not in (*documents.RAY_KINDS, "PodDisruptionBudget"), f"{each} belongs to a run or a deployment"


@pytest.mark.parametrize(("target", "preferred", "quota"), CASES)
def test_a_second_teams_objects_are_in_its_namespace_and_refer_to_each_other(
    target: str, preferred: tuple[str, ...], quota: int | None
) -> None:
    found = rendered(target, preferred, "research", "second", "one", None, True, quota)
    assert problems(found, None) == []
    shared = {document["metadata"]["name"] for document in found if document["kind"] in SHARED_KINDS}
    for document in found:
        assert document["metadata"].get("namespace") != "strata"
        for path, value in strings(document):
            if path[-1] in ("namespace", "matchNames", "kubernetes.io/metadata.name", "queue-name") or ".svc" in value:
                assert value != "strata" and ".strata.svc" not in value, f"{key(document)}: {path}"
            if path[-1] == "clusterQueue":
                assert ("ClusterQueue", value) in {(other["kind"], other["metadata"]["name"]) for other in found}
            if path[-1] == "kueue.x-k8s.io/queue-name":
                assert ("LocalQueue", value) in {(other["kind"], other["metadata"]["name"]) for other in found}
            if path[-1] == "kueue.x-k8s.io/priority-class":
                assert value in shared
    queues = [document for document in found if document["kind"] == "ClusterQueue"]
    assert all(q["spec"]["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "research"}} for q in queues)


def strings(node: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], str]]:
    if isinstance(node, str):
        return [(path, node)]
    if isinstance(node, list):
        return [found for item in node for found in strings(item, path)]
    if isinstance(node, dict):
        return [found for field, value in node.items() for found in strings(value, (*path, field))]
    return []


def test_a_budget_protects_only_the_pods_of_its_run() -> None:
    """Kubernetes evicts no pod that two budgets select."""
    found = side_by_side("ack", ("kueue",), 64)
    for (namespace, name, run), objects in found.items():
        for budget in (document for document in objects if document["kind"] == "PodDisruptionBudget"):
            selector = budget["spec"]["selector"]["matchLabels"]
            selecting = [
                (other, document["kind"])
                for other, others in found.items()
                for document in others
                if document["kind"] in documents.RAY_KINDS
                and document["metadata"]["namespace"] == budget["metadata"]["namespace"]
                for _, template in documents.pod_templates(document)
                if {k: v for k, v in selector.items() if k.startswith("strata.dev/")}.items()
                <= template["metadata"]["labels"].items()
            ]
            expected = "RayJob" if selector["strata.dev/part"] == "train" else "RayService"
            assert selecting and set(selecting) == {((namespace, name, run), expected)}, key(budget)


def test_volumes_of_teams_are_apart() -> None:
    for target, preferred in (("gke", FLEX), ("ack", ("kueue",))):
        for namespace in TEAMS:
            found = rendered(target, preferred, namespace, "strata", "one", None, False, 64)
            volumes = [document for document in found if document["kind"] == "PersistentVolume"]
            claims = {each["metadata"]["name"]: each for each in found if each["kind"] == "PersistentVolumeClaim"}
            assert f"{namespace}-store" in {volume["metadata"]["name"] for volume in volumes}
            for volume in volumes:
                claimed = volume["spec"]["claimRef"]
                assert claimed["namespace"] == namespace
                assert claims[claimed["name"]]["spec"]["volumeName"] == volume["metadata"]["name"]
                if target == "ack":
                    assert volume["spec"]["csi"]["volumeHandle"] == f"{namespace}-store"
                    assert volume["spec"]["csi"]["volumeAttributes"]["path"] == f"/{namespace}"


# Names


@pytest.mark.parametrize(
    ("deployment", "run", "expected"),
    [
        ("strata", "demo", "strata-demo"),
        ("strata", "a-b", "strata-a-b"),
        ("strata", "x" * 40, "strata-" + "x" * 40),
        ("s", "9", "s-9"),
    ],
)
def test_plain_names(deployment: str, run: str, expected: str) -> None:
    assert run_name(deployment, run) == expected


@pytest.mark.parametrize(
    ("deployment", "run", "start"),
    [
        ("strata", "Demo_1.5", "strata-demo-1-5-"),
        ("strata", "x" * 41, "strata-" + "x" * 34 + "-"),
        ("team-a", "demo", "team-a-demo-"),
        ("a" * 41, "demo", "a" * 41 + "-"),
        ("strata", "_", "strata-"),
        ("strata", "demo-", "strata-demo-"),
    ],
)
def test_other_names_end_in_a_digest(deployment: str, run: str, start: str) -> None:
    name = run_name(deployment, run)
    assert name.startswith(start) and len(name) <= 47 and DNS_1035.fullmatch(name)
    assert name != run_name(deployment, run + "x")


def test_a_deployment_and_a_run_are_told_apart() -> None:
    assert run_name("a", "b-c") != run_name("a-b", "c") != run_name("a-b-c", "")


@settings(max_examples=50)
@given(st.text("ab0-", max_size=39), st.text("aZ0._-", max_size=62))
def test_every_run_has_a_valid_name_and_label(middle: str, rest: str) -> None:
    deployment, run = f"a{middle}z", f"0{rest}"
    assert DNS_1035.fullmatch(deployment) and NAME.fullmatch(run)
    name, label = run_name(deployment, run), run_label(deployment, run)
    assert DNS_1035.fullmatch(name) and len(name) <= 47 and name.startswith(deployment)
    assert LABEL_VALUE.fullmatch(label)


# References


def placed(document: Document, **deploy: str) -> Document:
    place([document], DeploySection.model_validate({"name": "mine", "namespace": "team", **deploy}), "first")
    return document


def plain(kind: str, name: str, label: str = "common", **fields: Any) -> Document:
    return {"kind": kind, "metadata": {"name": name, "namespace": "strata", "labels": {"strata.dev/part": label}}, **fields}


def test_references_to_renamed_objects_follow_them() -> None:
    route = plain(
        "HTTPRoute",
        "strata-tls",
        "serve",
        spec={
            "parentRefs": [{"kind": "Gateway", "name": "strata-gateway", "namespace": "strata"}, {"name": "strata-gateway"}],
            "rules": [{"backendRefs": [{"name": "strata-serve-svc"}, {"kind": "Service", "name": "other"}]}],
        },
    )
    made = placed(route)
    assert (made["metadata"]["name"], made["metadata"]["namespace"]) == ("mine-tls", "team")
    assert made["spec"]["parentRefs"] == [
        {"kind": "Gateway", "name": "mine-gateway", "namespace": "team"},
        {"name": "mine-gateway"},
    ]
    assert made["spec"]["rules"] == [{"backendRefs": [{"name": "mine-serve-svc"}, {"kind": "Service", "name": "other"}]}]


def test_objects_in_other_namespaces_are_the_clusters() -> None:
    monitor = plain("PodMonitor", "strata-ray", "train", spec={"namespaceSelector": {"matchNames": ["strata"]}})
    monitor["metadata"]["namespace"] = "strata-monitoring"
    before = copy.deepcopy(monitor)
    assert placed(monitor) == before
    other = {"kind": "Namespace", "metadata": {"name": "strata-monitoring"}}
    assert placed(other) == {"kind": "Namespace", "metadata": {"name": "strata-monitoring"}}
    assert placed({"kind": "Namespace", "metadata": {"name": "strata"}})["metadata"]["name"] == "team"


def test_namespaces_are_replaced_where_they_are_named_and_nowhere_else() -> None:
    policy = plain(
        "NetworkPolicy",
        "from-strata",
        spec={
            "ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "strata"}}}]}],
            "expressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["strata", "monitoring"]}],
            "command": ["run", "http://strata-redis.strata.svc:80", "strata"],
            "relabelings": [{"sourceLabels": ["namespace"], "regex": "strata"}, {"sourceLabels": ["job"], "regex": "strata"}],
            "namespaceSelector": {"matchNames": ["strata", "other"]},
            "namespace": "monitoring",
            "app": "strata",
        },
    )
    spec = placed(policy)["spec"]
    assert spec == {
        "ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "team"}}}]}],
        "expressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team", "monitoring"]}],
        "command": ["run", "http://strata-redis.team.svc:80", "strata"],
        "relabelings": [{"sourceLabels": ["namespace"], "regex": "team"}, {"sourceLabels": ["job"], "regex": "strata"}],
        "namespaceSelector": {"matchNames": ["team", "other"]},
        "namespace": "monitoring",
        "app": "strata",
    }


@pytest.mark.parametrize(
    ("kind", "name", "label", "expected"),
    [
        ("Job", "strata-fabric", "train", "mine-first-fabric"),
        ("Job", "strata-pull", "serve", "mine-pull"),
        ("Job", "stratagem", "train", "stratagem"),
        ("RayCluster", "strata-lab", "lab", "mine-lab"),
        ("ServiceAccount", "strata-train", "common", "strata-train"),
        ("Queue", "strata", "common", "team"),
        ("ClusterQueue", "strata-flex-start", "common", "team.flex-start"),
        ("PersistentVolume", "strata-models", "common", "team-models"),
        ("ResourceFlavor", "strata", "train", "strata"),
        ("ClusterRole", "strata-history", "monitoring", "strata-history"),
        ("ClusterRoleBinding", "strata-history", "monitoring", "team-history"),
        ("DaemonSet", "strata-gpu-exporter", "monitoring", "strata-gpu-exporter"),
    ],
)
def test_names_by_scope(kind: str, name: str, label: str, expected: str) -> None:
    document = plain(kind, name, label, spec={"template": {}} if kind in ("Job", "DaemonSet") else {})
    assert placed(document)["metadata"]["name"] == expected
