"""Adds a network to the pods with GPUs, from the files of its component.

`pods.yaml` is for all of them, `training.yaml` for workers of training and the lab, `engines.yaml` for engines. Each is a part of
a pod template; its first container is the Ray container. In Python and not as kustomize patches, for the reason of `fill.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from strata.deploy.documents import Document, worker_groups
from strata.deploy.layout import Group
from strata.deploy.names import GPU_RESOURCE, GROUPS
from strata.deploy.networks.facts import NETWORKS
from strata.platform.recipe import Recipe

KEYS = ("name", "mountPath", "key")  # of the entries of a pod's lists
ATTACHMENTS = "k8s.v1.cni.cncf.io/networks"  # Multus: one attachment for each SR-IOV device


def add(documents: list[Document], folder: Path, recipe: Recipe, groups: Mapping[str, Group]) -> None:
    """Changes the documents in place. `folder` is the component's."""
    network = NETWORKS[folder.name]
    for document in documents:
        names = GROUPS.get(document["kind"], {})
        for spec in worker_groups(document):
            name = names.get(spec["groupName"], "")
            group = groups.get(name)
            if group is None or not group.gpus:
                continue
            part = "engines" if name in ("prefill", "decode") else "training"
            if part == "engines" and not network.engines:
                continue
            for fragment in _fragments(folder, "pods", part):
                spec["template"] = merged(spec["template"], fragment)
            if network.resource:
                _request(spec["template"], recipe.deploy.rdma_resource or network.resource, group.gpus if network.per_gpu else 1)
    if network.resource:
        _cover(documents, recipe.deploy.rdma_resource or network.resource)


def merged(base: Any, added: Any) -> Any:
    """Merge as `kubectl apply` does: objects by key, lists of objects by their name, lists of words without repetition."""
    if isinstance(base, dict) and isinstance(added, dict):
        return {
            key: merged(base[key], added[key]) if key in base and key in added else added.get(key, base.get(key))
            for key in [*base, *(key for key in added if key not in base)]
        }
    if isinstance(base, list) and isinstance(added, list):
        result = list(base)
        for entry in added:
            at = next((i for i, one in enumerate(result) if _identity(one) == _identity(entry)), None)
            if at is None:
                result.append(entry)
            else:
                result[at] = merged(result[at], entry)
        return result
    return added


def _identity(entry: Any) -> Any:
    if isinstance(entry, dict):
        return next(((key, entry[key]) for key in KEYS if key in entry), None) or repr(entry)
    return entry


def _fragments(folder: Path, *names: str) -> list[Document]:
    files = [folder / f"{name}.yaml" for name in names]
    return [yaml.safe_load(file.read_text()) for file in files if file.exists()]


def _request(template: Document, resource: str, count: int) -> None:
    """Requests devices of a plugin, which Kubernetes does not overcommit: requests equal limits."""
    resources = template["spec"]["containers"][0]["resources"]
    for key in ("requests", "limits"):
        resources.setdefault(key, {})[resource] = str(count)
    annotations = template.get("metadata", {}).get("annotations") or {}
    if ATTACHMENTS in annotations:
        annotations[ATTACHMENTS] = ",".join([annotations[ATTACHMENTS]] * count)


def _cover(documents: list[Document], resource: str) -> None:
    """Covers the resource in Kueue's queues, which never admit pods with a resource that they do not cover. The quota is that of
    GPUs: a pod requests no more devices than GPUs."""
    for document in documents:
        if document["kind"] != "ClusterQueue":
            continue
        for covered in document["spec"]["resourceGroups"]:
            if GPU_RESOURCE not in covered["coveredResources"] or resource in covered["coveredResources"]:
                continue
            covered["coveredResources"].append(resource)
            for flavor in covered["flavors"]:
                gpus = next(each["nominalQuota"] for each in flavor["resources"] if each["name"] == GPU_RESOURCE)
                flavor["resources"].append({"name": resource, "nominalQuota": gpus})
