"""Fills manifests with the values of a recipe.

In Python and not as kustomize patches, because a JSON patch addresses a worker group or an argument by its list index; this code
addresses it by name.
"""

import copy
import hashlib
import json
import shlex
from collections.abc import Mapping

import yaml

from strata.deploy.addons import history, models
from strata.deploy.documents import Document, cluster_spec, pod_templates, worker_groups
from strata.deploy.layout import Group, head_growth
from strata.deploy.names import (
    ENGINE_RESOURCE,
    GATEWAY_RESOURCE,
    GPU_RESOURCE,
    GROUPS,
    PORT,
    RECIPE_IN_POD,
    RECIPE_MAP,
    TRAIN_BUDGET,
    TRAIN_JOB,
)
from strata.deploy.quantities import GIB, exact, number
from strata.deploy.targets import SELECTORS
from strata.platform import recipe_file
from strata.platform.recipe import Recipe

SERVED_ANNOTATION = "strata.dev/served"


def fill(documents: list[Document], recipe: Recipe, groups: Mapping[str, Group], run: str, target: str = "") -> list[Document]:
    filled = copy.deepcopy(documents)
    deployed = as_deployed(recipe)
    pulled = models.are_pulled(filled)
    for document in filled:
        kind, name = document["kind"], document["metadata"]["name"]
        if kind in GROUPS:
            _size(document, groups)
        if (kind, name) == ("RayJob", TRAIN_JOB):
            words = ["strata", "train", "--recipe", RECIPE_IN_POD, "--run", run, "--or-resume"]
            document["spec"]["entrypoint"] = shlex.join(words)
        if kind == "RayService":
            _serve(document, deployed, models.served(recipe, run))
        if (kind, name) == ("ConfigMap", RECIPE_MAP):
            document["data"]["recipe.yaml"] = recipe_file.dump(deployed)
        if (kind, name) == ("PodDisruptionBudget", TRAIN_BUDGET) and "train" in groups:
            document["spec"]["minAvailable"] = 1 + groups["train"].pods  # the head and every worker
        if kind == "PersistentVolume" and recipe.deploy.storage:
            _store(document, recipe.deploy.storage)
        if kind == "Job" and document["metadata"]["name"] == models.PULL_JOB:
            models.fill_pull_job(document, filled, recipe, run)
        models.add(document, recipe, run, target, pulled)
        history.fill(document, recipe.deploy.storage)
    return filled


def as_deployed(recipe: Recipe) -> Recipe:
    """Recipe as the pods read it: the gateway listens on all interfaces, with one gateway per pod."""
    serve = recipe.serve.model_copy(update={"host": "0.0.0.0", "port": PORT, "gateways": 1})
    return recipe.model_copy(update={"serve": serve})


def _size(document: Document, groups: Mapping[str, Group]) -> None:
    for spec in worker_groups(document):
        group = groups.get(GROUPS[document["kind"]].get(spec["groupName"], ""))
        if group is None:
            continue
        spec["minReplicas"], spec["replicas"], spec["maxReplicas"] = group.least, group.pods, group.most
        pod = spec["template"]["spec"]
        found = pod.get("nodeSelector") or {}
        pod["nodeSelector"] = {key: value for key, value in found.items() if key not in SELECTORS} | group.selector
        _resources(pod["containers"][0], group)  # KubeRay runs Ray in the first container
        if group.engines:
            engines = ENGINE_RESOURCE.format(group=spec["groupName"])
            spec["resources"] = {GATEWAY_RESOURCE: "1", engines: str(group.engines)}
    found_groups = [groups[name] for name in GROUPS[document["kind"]].values() if name in groups]
    _grow_head(document, sum(group.most for group in found_groups))


def _grow_head(document: Document, pods: int) -> None:
    cpus, gib = head_growth(pods)
    found = cluster_spec(document)
    if not (cpus or gib) or found is None:
        return
    resources = found[1]["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]
    for amounts in resources.values():
        for resource, more in (("cpu", cpus), ("memory", gib * GIB)):
            if resource in amounts:
                amounts[resource] = exact(resource, number(amounts[resource]) + more)


def _resources(container: Document, group: Group) -> None:
    """Sets limits, which Ray reads as the node's resources. Pods with GPUs run on cloud nodes and request all of their limits; on
    a laptop, pods share cores and memory, and the requests of the manifests are unchanged."""
    resources = container.setdefault("resources", {})
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    wanted = {"cpu": str(group.cpus), "memory": f"{group.memory_gib}Gi"} | ({GPU_RESOURCE: str(group.gpus)} if group.gpus else {})
    if GPU_RESOURCE in requests:
        resources["requests"] = {key: value for key, value in requests.items() if key != GPU_RESOURCE} | wanted
    resources["limits"] = {key: value for key, value in limits.items() if key != GPU_RESOURCE} | wanted


def _serve(document: Document, recipe: Recipe, model: str) -> None:
    config = yaml.safe_load(document["spec"]["serveConfigV2"])
    for application in config["applications"]:
        application["args"] = (application.get("args") or {}) | {"recipe": RECIPE_IN_POD, "model": model}
    document["spec"]["serveConfigV2"] = yaml.safe_dump(config, sort_keys=False)
    # KubeRay starts an upgrade when a pod template changes, but not when the ConfigMap with the recipe does.
    served = json.dumps([recipe.serve.model_dump(mode="json"), model], sort_keys=True)
    mark = hashlib.sha256(served.encode()).hexdigest()[:16]
    for _, template in pod_templates(document):
        template.setdefault("metadata", {}).setdefault("annotations", {})[SERVED_ANNOTATION] = mark


def _store(document: Document, storage: str) -> None:
    source = document["spec"].get("csi") or {}
    match source.get("driver"):
        case "gcsfuse.csi.storage.gke.io":
            source["volumeHandle"] = storage
        case "nasplugin.csi.alibabacloud.com":
            source["volumeAttributes"]["server"] = storage
