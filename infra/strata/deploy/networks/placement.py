"""Places the pods of a Ray cluster near each other: by Kueue's topology-aware scheduling, or by the scheduler's preference."""

import copy
import re
from collections.abc import Mapping

from strata.deploy.documents import Document, worker_groups
from strata.deploy.layout import Group
from strata.deploy.names import GPU_RESOURCE, GROUPS, PART_LABEL, QUEUE_LABEL
from strata.deploy.networks.facts import LEVELS, NEAREST
from strata.deploy.networks.pods import merged
from strata.deploy.targets import MACHINE_LABEL

PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"
TOLERATION = {"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}
NODES_THEMSELVES = ("cloud.google.com/gce-topology-host", "kubernetes.io/hostname")


def add_topology(documents: list[Document], target: str, groups: Mapping[str, Group]) -> list[Document]:
    """Kueue's queue with a topology. Its flavor gets the topology and the labels and the toleration of the GPU nodes.

    A flavor with a topology takes only pods that request one, and needs the topology's labels on its nodes. Heads run on nodes
    without GPUs, so each queue also gets a copy of the flavor without a topology and without GPUs.

    Flavors belong to all teams, and Kueue does not let their node labels change. So a flavor and its queues carry the name of the
    machine: runs on other machines have others."""
    found = [document for document in documents if document["kind"] == "Topology"]
    machine = "-" + re.sub(r"[^a-z0-9]+", "-", groups["train"].selector[MACHINE_LABEL].lower())
    for document in found:
        document["spec"]["levels"] = [{"nodeLabel": label} for label in LEVELS[target]]
    added = []
    for document in documents:
        metadata, spec = document["metadata"], document.get("spec") or {}
        if document["kind"] == "ResourceFlavor":
            added.append(_for_heads(document))
            metadata["name"] += machine
            document["spec"] = spec | {
                "nodeLabels": groups["train"].selector,
                "tolerations": [TOLERATION],
                "topologyName": found[0]["metadata"]["name"],
            }
        if document["kind"] == "ClusterQueue":
            metadata["name"] += machine
            for covered in spec["resourceGroups"]:
                heads = [_without_gpus(flavor) for flavor in covered["flavors"]]
                covered["flavors"] = [flavor | {"name": flavor["name"] + machine} for flavor in covered["flavors"]] + heads
        if document["kind"] == "LocalQueue":
            metadata["name"] += machine
            spec["clusterQueue"] += machine
        if QUEUE_LABEL in (metadata.get("labels") or {}):
            metadata["labels"][QUEUE_LABEL] += machine
        for group in _groups_with_gpus(document, groups):
            group["template"] = merged(group["template"], {"metadata": {"annotations": {PREFERRED: NEAREST[target]}}})
    return documents + added


def add_compact(documents: list[Document], target: str, groups: Mapping[str, Group]) -> None:
    """Preference for nodes near those of other pods of the same Ray cluster, more for a narrower level of the network."""
    levels = [label for label in LEVELS[target] if label not in NODES_THEMSELVES]
    for document in documents:
        for spec in _groups_with_gpus(document, groups):
            part = spec["template"]["metadata"]["labels"][PART_LABEL]
            terms = [
                {
                    "weight": 100 * number // len(levels),
                    "podAffinityTerm": {
                        "topologyKey": label,
                        "labelSelector": {"matchLabels": {PART_LABEL: part}},
                        "matchLabelKeys": ["ray.io/cluster"],
                    },
                }
                for number, label in enumerate(levels, 1)
            ]
            affinity = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}
            spec["template"] = merged(spec["template"], {"spec": {"affinity": affinity}})


def _groups_with_gpus(document: Document, groups: Mapping[str, Group]) -> list[Document]:
    names = GROUPS.get(document["kind"], {})
    found = []
    for spec in worker_groups(document):
        group = groups.get(names.get(spec["groupName"], ""))
        if group is not None and group.gpus:
            found.append(spec)
    return found


def _heads_name(name: str) -> str:
    return f"{name}-heads"


def _for_heads(flavor: Document) -> Document:
    copied = copy.deepcopy(flavor)
    copied["metadata"]["name"] = _heads_name(flavor["metadata"]["name"])
    return copied


def _without_gpus(flavor: Document) -> Document:
    """Quota of heads and helper pods: the queue's other quotas, which nothing else in this flavor uses, and no devices."""
    quotas = [each | ({"nominalQuota": "0"} if "/" in each["name"] else {}) for each in flavor["resources"]]
    return {"name": _heads_name(flavor["name"]), "resources": quotas}
