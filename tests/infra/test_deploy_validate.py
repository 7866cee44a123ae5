"""Validation of objects: invalid ones are reported with the path of the field."""

import copy
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from strata.deploy import documents, render
from strata.deploy.render import Order
from strata.deploy.validate import has_schema, problems
from strata.platform import recipe_file
from strata.platform.errors import UserError

FOLDER = os.environ.get("STRATA_KUBERAY_CRDS")
CRDS = Path(FOLDER) if FOLDER else None
needs_crds = pytest.mark.skipif(CRDS is None, reason="STRATA_KUBERAY_CRDS is not set to a folder of CRDs ('make crds')")

Objects = dict[str, dict[str, Any]]


@lru_cache
def built() -> list[dict[str, Any]]:
    recipe = recipe_file.load("8xh100", ["deploy.gpu=h100", "deploy.storage=bucket"])
    return render.render(Order("gke", recipe, "demo", image="example.com/strata:1.0"))


def broken(change: Callable[[Objects], Any]) -> list[dict[str, Any]]:
    objects = {documents.title(document): document for document in copy.deepcopy(built())}
    change(objects)
    return list(objects.values())


def the_problem(change: Callable[[Objects], Any], crds: Path | None) -> tuple[str, str]:
    """The single problem of the single changed object."""
    changed = [document for document in broken(change) if document not in built()]
    [problem] = problems(changed, crds)
    return f"{problem.object}: {problem.path}", problem.message


def other_problems(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Problems by all checks but the schemas of CRDs."""
    return [(f"{problem.object}: {problem.path}", problem.message) for problem in problems(found, None)]


def job(objects: Objects) -> Any:
    return objects["RayJob/strata-demo"]


def job_pod(objects: Objects) -> Any:
    return job(objects)["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]


def job_container(objects: Objects) -> Any:
    return job_pod(objects)["containers"][0]


def decode_budget(objects: Objects) -> Any:
    return objects["PodDisruptionBudget/strata-serve-decode"]["spec"]["selector"]


def monitor(labels: dict[str, str], port: str) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "some", "namespace": "strata"},
        "spec": {"selector": {"matchLabels": labels}, "podMetricsEndpoints": [{"port": port}]},
    }


POD = "RayJob/strata-demo: spec.rayClusterSpec.workerGroupSpecs[0].template.spec"


def test_rendered_objects_are_valid() -> None:
    assert problems(built(), CRDS) == []


ANYWHERE = ("auth", "gcs-ft", "network-policy", "spot", "grafana")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "recipe", "overrides", "components"),
    [
        ("gke", "8xh100", ["deploy.gpu=h100", "deploy.storage=bucket"], ("volcano", "monitoring-gke")),
        ("ack", "8xh100", ["deploy.gpu=h20", "deploy.storage=mine.nas.aliyuncs.com"], ("kueue", "dcgm", "monitoring-arms")),
        ("kind", "laptop", [], ("volcano", "nvml", "monitoring")),
    ],
    ids=["gke", "ack", "kind"],
)
def test_combined_components_are_valid(target: str, recipe: str, overrides: list[str], components: tuple[str, ...]) -> None:
    order = Order(target, recipe_file.load(recipe, overrides), "demo", (*ANYWHERE, *components), image="example.com/strata:1.0")
    assert problems(render.render(order), CRDS) == []


@pytest.mark.parametrize(
    ("change", "path", "expected"),
    [
        (
            lambda o: o["PodDisruptionBudget/strata-demo-train"]["spec"].update(minimum=1),
            "PodDisruptionBudget/strata-demo-train: spec",
            "'minimum' was unexpected",
        ),
        (
            lambda o: o["PersistentVolumeClaim/strata-store"]["spec"].update(accessModes="ReadWriteMany"),
            "PersistentVolumeClaim/strata-store: spec.accessModes",
            "is not of type",
        ),
        (
            lambda o: o["ConfigMap/strata-demo-recipe"]["data"].update(number=1),
            "ConfigMap/strata-demo-recipe: data.number",
            "1 is not of type",
        ),
        (lambda o: o["Namespace/strata"].pop("apiVersion"), "Namespace/strata: apiVersion", "is missing"),
        (lambda o: o["Namespace/strata"].pop("metadata"), "Namespace/?: metadata.name", "is missing"),
    ],
)
def test_core_objects(change: Callable[[Objects], Any], path: str, expected: str) -> None:
    where, message = the_problem(change, None)
    assert where == path
    assert expected in message


@needs_crds
@pytest.mark.parametrize(
    ("change", "path", "expected"),
    [
        (
            lambda o: o["RayJob/strata-demo"]["spec"].update(entryPoint="x"),
            "RayJob/strata-demo: spec",
            "'entryPoint' was unexpected",
        ),
        (lambda o: job_pod(o).update(node_selector={}), POD, "'node_selector' was unexpected"),
        (lambda o: job_pod(o).update(terminationGracePeriodSeconds="120"), f"{POD}.terminationGracePeriodSeconds", "not of type"),
        (lambda o: job_container(o).pop("name"), f"{POD}.containers[0]", "'name' is a required property"),
        (
            lambda o: job_container(o)["resources"]["limits"].update(memory="1 Gi"),
            f"{POD}.containers[0].resources.limits.memory",
            "match",
        ),
        (lambda o: job_container(o)["ports"].append({"containerPort": 8080}), f"{POD}.containers[0].ports[1]", "occurs twice"),
        (
            lambda o: job(o)["metadata"].update(labels={"a": 1}),
            "RayJob/strata-demo: metadata.labels.a",
            "1 is not of type 'string'",
        ),
        (
            lambda o: o["RayCluster/strata-lab"]["spec"]["autoscalerOptions"].update(version="v3"),
            "RayCluster/strata-lab: spec.autoscalerOptions.version",
            "is not one of",
        ),
        (
            lambda o: o["RayService/strata"].update(apiVersion="ray.io/v2"),
            "RayService/strata: apiVersion",
            "not defined by the CRDs",
        ),
    ],
)
def test_ray_objects_by_their_schema(change: Callable[[Objects], Any], path: str, expected: str) -> None:
    where, message = the_problem(change, CRDS)
    assert where == path
    assert expected in message


@needs_crds
def test_a_quantity_may_be_a_number() -> None:
    limits = broken(
        lambda o: job_container(o)["resources"]["limits"].update(cpu=int(job_container(o)["resources"]["limits"]["cpu"]))
    )
    assert problems(limits, CRDS) == []


@pytest.mark.parametrize(
    ("change", "path", "expected"),
    [
        (
            lambda o: o["RayService/strata"]["spec"]["upgradeStrategy"]["clusterUpgradeOptions"].update(stepSizePercent=90),
            "RayService/strata: spec.upgradeStrategy.clusterUpgradeOptions.stepSizePercent",
            "more than maxSurgePercent",
        ),
        (
            lambda o: o["RayJob/strata-demo"]["metadata"].update(name="x" * 48),
            f"RayJob/{'x' * 48}: metadata.name",
            "may have 47",
        ),
        (
            lambda o: o["RayCluster/strata-lab"]["spec"]["headGroupSpec"]["template"]["spec"].update(restartPolicy="Always"),
            "RayCluster/strata-lab: spec.headGroupSpec.template.spec.restartPolicy",
            "Never or unset",
        ),
    ],
)
def test_ray_objects_by_the_operators_rules(change: Callable[[Objects], Any], path: str, expected: str) -> None:
    [problem] = problems(broken(change), CRDS)
    assert f"{problem.object}: {problem.path}" == path
    assert expected in problem.message


def test_a_malformed_ray_object_is_rejected_without_crds() -> None:
    def change(objects: Objects) -> None:
        objects["RayService/strata"]["spec"]["rayClusterConfig"]["workerGroupSpecs"] = "many"

    where, message = the_problem(change, None)
    assert where == "RayService/strata: spec"
    assert "set --crds to find it" in message


@pytest.mark.parametrize(
    ("change", "path", "expected"),
    [
        (lambda o: o.pop("ServiceAccount/strata-serve"), None, "ServiceAccount strata-serve is not among the objects"),
        (lambda o: o.pop("ConfigMap/strata-demo-recipe"), None, "ConfigMap strata-demo-recipe is not among the objects"),
        (lambda o: o.pop("PersistentVolumeClaim/strata-store"), None, "PersistentVolumeClaim strata-store is not among"),
        (
            lambda o: job_container(o)["env"].append(
                {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "strata-demo-recipe", "key": "other.yaml"}}}
            ),
            f"{POD}.containers[0].env[5].valueFrom.configMapKeyRef",
            "ConfigMap strata-demo-recipe has no key other.yaml",
        ),
        (
            lambda o: job_container(o)["volumeMounts"].append({"name": "nothing", "mountPath": "/x"}),
            f"{POD}.containers[0].volumeMounts[3].name",
            "no volume nothing",
        ),
        (lambda o: job_container(o).update(image="example.com/strata:latest"), f"{POD}.containers[0].image", "no immutable tag"),
        (
            lambda o: job_container(o)["env"].append({"name": "STRATA_HOME", "value": "/mnt/strata"}),
            None,
            "STRATA_HOME occurs twice",
        ),
        (lambda o: job_container(o).update(image="example.com:5000/strata"), f"{POD}.containers[0].image", "no immutable tag"),
        (lambda o: job_container(o).pop("image"), f"{POD}.containers[0].image", "not set"),
        (
            lambda o: job_container(o).update(readinessProbe={"httpGet": {"port": "serve"}}),
            f"{POD}.containers[0].readinessProbe.httpGet.port",
            "no port named serve",
        ),
        (lambda o: job_container(o)["env"][0].update(value="/tmp/strata"), f"{POD}.containers[0].env", "not on shared storage"),
        (
            lambda o: job_pod(o)["volumes"].__setitem__(1, {"name": "store", "emptyDir": {}}),
            f"{POD}.containers[0].env",
            "not on shared storage",
        ),
        (
            lambda o: decode_budget(o)["matchLabels"].update({"ray.io/group": "decod"}),
            "PodDisruptionBudget/strata-serve-decode: spec.selector",
            "no pod",
        ),
        (
            lambda o: decode_budget(o).update(
                matchExpressions=[{"key": "ray.io/group", "operator": "NotIn", "values": ["decode"]}]
            ),
            "PodDisruptionBudget/strata-serve-decode: spec.selector",
            "no pod",
        ),
        (lambda o: o.update(m=monitor({"strata.dev/part": "other"}, "metrics")), "PodMonitor/some: spec.selector", "no pod"),
        (
            lambda o: o.update(m=monitor({"ray.io/node-type": "worker"}, "as-metrics")),
            "PodMonitor/some: spec.podMetricsEndpoints[0].port",
            "has a port named as-metrics",
        ),
        (lambda o: o.update(m=copy.deepcopy(o["Namespace/strata"])), "Namespace/strata: metadata.name", "twice"),
    ],
)
def test_broken_references_between_objects(change: Callable[[Objects], Any], path: str | None, expected: str) -> None:
    found = other_problems(broken(change))
    assert found
    for where, message in found:
        assert expected in message
        assert path in (None, where)


@pytest.mark.parametrize("labels", [{"ray.io/node-type": "head"}, {"ray.io/is-ray-node": "yes"}, {"ray.io/cluster": "any"}])
def test_monitors_find_pods_by_kuberays_labels(labels: dict[str, str]) -> None:
    assert other_problems(broken(lambda o: o.update(m=monitor(labels, "metrics")))) == []


def test_monitors_of_other_projects_may_match_no_pods() -> None:
    assert other_problems(broken(lambda o: o.update(m=monitor({"app.kubernetes.io/name": "kuberay"}, "metrics")))) == []


def test_a_single_part_may_include_monitors_of_the_others() -> None:
    serving = monitor({"ray.io/group": "decode"}, "metrics")
    alone = [document for document in built() if documents.part(document) in ("common", "train")]
    assert other_problems([*alone, serving]) == []


def test_kinds_with_a_schema() -> None:
    assert not has_schema(monitor({}, "metrics"), None)
    assert has_schema({"apiVersion": "v1", "kind": "Namespace"}, CRDS)
    assert not has_schema({"apiVersion": "ray.io/v1", "kind": "RayJob"}, None)


def test_a_folder_without_crds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There are no CRDs in"):
        problems(built(), tmp_path)
