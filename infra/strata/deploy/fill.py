"""Fills manifests with the values of a recipe.

In Python and not as kustomize patches, because a JSON patch addresses a worker group or an argument by its list index; this code
addresses it by name.
"""

import copy
import hashlib
import json
import math
import shlex
from collections.abc import Mapping

import yaml

from strata.deploy.addons import history, models, tls
from strata.deploy.documents import Document, pod_templates, worker_groups
from strata.deploy.layout import Group
from strata.deploy.names import (
    ENGINE_RESOURCE,
    GATEWAY_RESOURCE,
    GROUPS,
    NAME_ENDS,
    PORT,
    RECIPE_IN_POD,
    RECIPE_MAP,
    TRAIN_BUDGET,
)
from strata.deploy.targets import SELECTORS
from strata.platform import recipe_file
from strata.platform.recipe import Recipe

GPU = "nvidia.com/gpu"
HEADS_CPUS, HEADS_GIB = 24, 64  # upper bound for the requests of all Ray heads and helper pods in the manifests
SERVED_ANNOTATION = "strata.dev/served"


def fill(documents: list[Document], recipe: Recipe, groups: Mapping[str, Group], run: str, target: str = "") -> list[Document]:
    filled = copy.deepcopy(documents)
    deployed = as_deployed(recipe)
    pulled = models.are_pulled(filled)
    for document in filled:
        kind = document["kind"]
        if kind in NAME_ENDS:
            document["metadata"]["name"] = recipe.deploy.name + NAME_ENDS[kind]
            _size(document, groups)
        if kind == "RayJob":
            words = ["strata", "train", "--recipe", RECIPE_IN_POD, "--run", run, "--or-resume"]
            document["spec"]["entrypoint"] = shlex.join(words)
        if kind == "RayService":
            _serve(document, deployed, models.served(recipe, run))
        if kind == "ConfigMap" and document["metadata"]["name"] == RECIPE_MAP:
            document["data"]["recipe.yaml"] = recipe_file.dump(deployed)
        if kind == "PodDisruptionBudget" and document["metadata"]["name"] == TRAIN_BUDGET and "train" in groups:
            document["spec"]["minAvailable"] = 1 + groups["train"].pods  # the head and every worker
        if kind == "ClusterQueue" and any(group.gpus for group in groups.values()):
            _quota(document, groups, recipe.deploy.nodes)
        if kind == "PersistentVolume" and recipe.deploy.storage:
            _store(document, recipe.deploy.storage)
        if kind == "Job" and document["metadata"]["name"] == models.PULL_JOB:
            models.fill_pull_job(document, filled, recipe, run)
        models.add(document, recipe, run, target, pulled)
        history.fill(document, recipe.deploy.storage)
        tls.fill(document, recipe.deploy.name)
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


def _resources(container: Document, group: Group) -> None:
    """Sets limits, which Ray reads as the node's resources. Pods with GPUs run on cloud nodes and request all of their limits; on
    a laptop, pods share cores and memory, and the requests of the manifests are unchanged."""
    resources = container.setdefault("resources", {})
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    wanted = {"cpu": str(group.cpus), "memory": f"{group.memory_gib}Gi"} | ({GPU: str(group.gpus)} if group.gpus else {})
    if GPU in requests:
        resources["requests"] = {key: value for key, value in requests.items() if key != GPU} | wanted
    resources["limits"] = {key: value for key, value in limits.items() if key != GPU} | wanted


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


def _quota(document: Document, groups: Mapping[str, Group], nodes: int | None) -> None:
    """Sets Kueue's quota to all of `deploy.nodes`, or, if it is not set, to the requests of the largest Ray cluster; the others
    then queue behind it. With a smaller quota, Kueue would leave that cluster pending forever without a message."""
    groups = {name: group for name, group in groups.items() if group.gpus}
    clusters = [[groups[name] for name in inside.values() if name in groups] for inside in GROUPS.values()]
    gpus = max(sum(group.most * group.gpus for group in cluster) for cluster in clusters)
    if nodes is not None:
        gpus = max(gpus, nodes * max(group.node_gpus for group in groups.values()))
    wanted = {
        GPU: str(gpus),
        "cpu": str(HEADS_CPUS + math.ceil(gpus * max(group.cpus / group.gpus for group in groups.values()))),
        "memory": f"{HEADS_GIB + math.ceil(gpus * max(group.memory_gib / group.gpus for group in groups.values()))}Gi",
    }
    for resources in document["spec"]["resourceGroups"]:
        for flavor in resources["flavors"]:
            for resource in flavor["resources"]:
                resource["nominalQuota"] = wanted.get(resource["name"], resource["nominalQuota"])


def _store(document: Document, storage: str) -> None:
    source = document["spec"].get("csi") or {}
    match source.get("driver"):
        case "gcsfuse.csi.storage.gke.io":
            source["volumeHandle"] = storage
        case "nasplugin.csi.alibabacloud.com":
            source["volumeAttributes"]["server"] = storage
