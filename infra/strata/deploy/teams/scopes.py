"""Scopes of rendered objects: a run, a deployment, a team or the whole cluster.

| scope | objects | name |
|---|---|---|
| run | RayJob, its disruption budget, the ConfigMap with the recipe | `<deploy.name>-<run>...` |
| deployment | RayService, RayCluster, their disruption budgets | `<deploy.name>...` |
| team | all others in a namespace, and its volumes and queues | as in the manifests, in `deploy.namespace` |
| cluster | `SHARED_KINDS`, and objects in other namespaces | as in the manifests |

Objects of a team and of the cluster are the same in every rendering, so a second run or team does not change them.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from strata.deploy.documents import Document, part, pod_templates
from strata.deploy.kuberay.rules import DNS_1035, LONGEST
from strata.deploy.names import BASE, DEPLOYMENT_LABEL, PART_LABEL, QUEUE_LABEL, RECIPE_MAP, RUN_LABEL, TRAIN_JOB
from strata.platform.recipe import DeploySection

# Kinds of the cluster scope: the same for all teams.
SHARED_KINDS = (
    "AdmissionCheck",
    "ClusterPodMonitoring",
    "ClusterRole",
    "ClusterRules",
    "ProvisioningRequestConfig",
    "ResourceFlavor",
    "Topology",
    "WorkloadPriorityClass",
)
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
QUEUE_LABELS = {QUEUE_LABEL: "LocalQueue", "volcano.sh/queue-name": "Queue"}
GATEWAY_LABEL = "gateway.networking.k8s.io/gateway-name"
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
HOST = f".{BASE}.svc"  # in the host name of a Service
DIGEST = 5  # characters

Names = Mapping[tuple[str, str], str]


def run_name(deployment: str, run: str) -> str:
    """`<deployment>-<run>`, a name that KubeRay accepts for a RayJob. It is shortened and ends in a digest if it would be too
    long, if the run's name is not a DNS label, or if the deployment's name contains a '-': `a-b` with the run `c` must not
    overwrite `a` with the run `b-c`."""
    whole = f"{deployment}-{run}"
    if "-" not in deployment and DNS_1035.fullmatch(whole) and len(whole) <= LONGEST["RayJob"]:
        return whole
    digest = base64.b32encode(hashlib.sha256(f"{deployment}/{run}".encode()).digest()).decode().lower()[:DIGEST]
    space = LONGEST["RayJob"] - len(deployment) - DIGEST - 2
    readable = re.sub(r"[^a-z0-9]+", "-", run.lower())[: max(space, 0)].strip("-")
    return "-".join(word for word in (deployment, readable, digest) if word)


def run_label(deployment: str, run: str) -> str:
    """The run's name as a label's value, which cannot end in a punctuation mark."""
    return run if LABEL_VALUE.fullmatch(run) else run_name(deployment, run)


def place(documents: list[Document], deploy: DeploySection, run: str) -> None:
    """Renames objects, and everything that refers to them, to the run, the deployment and the team; adds labels to select by."""
    names = _names(documents, deploy, run)
    for document in documents:
        if _is_shared(document):
            continue
        kind, metadata = document["kind"], document["metadata"]
        match _scope(document):
            case "run":
                _label(document, {DEPLOYMENT_LABEL: deploy.name, RUN_LABEL: run_label(deploy.name, run)})
            case "deployment":
                _label(document, {DEPLOYMENT_LABEL: deploy.name})
        _refer(document, names, deploy.namespace)
        metadata["name"] = names.get((kind, metadata["name"]), metadata["name"])
        if kind == "PersistentVolume":
            _separate_storage(document, deploy.namespace)


def _is_shared(document: Document) -> bool:
    """True for objects of the cluster: of a shared kind, or in a namespace other than a team's, such as the exporters'."""
    metadata = document["metadata"]
    namespace = metadata["name"] if document["kind"] == "Namespace" else metadata.get("namespace", BASE)
    return document["kind"] in SHARED_KINDS or namespace != BASE


def _scope(document: Document) -> str | None:
    """`run` or `deployment`; None for objects of the team and of the cluster."""
    kind, name, label = document["kind"], document["metadata"]["name"], part(document)
    if kind == "RayJob" or label == "train" or (kind, name) == ("ConfigMap", RECIPE_MAP):
        return "run"
    return "deployment" if kind in ("RayService", "RayCluster") or label in ("serve", "lab") else None


def _names(documents: list[Document], deploy: DeploySection, run: str) -> dict[tuple[str, str], str]:
    """New names by kind and name in the manifests."""
    of_run, name = run_name(deploy.name, run), deploy.name
    names = {
        ("Namespace", BASE): deploy.namespace,
        ("RayJob", TRAIN_JOB): of_run,
        ("ConfigMap", RECIPE_MAP): f"{of_run}-recipe",
        ("Gateway", f"{BASE}-gateway"): f"{name}-gateway",  # created by KubeRay for the RayService, as are these Services
        ("Secret", f"{BASE}-tls"): f"{name}-tls",  # the certificate, from outside
        ("Service", f"{BASE}-serve-svc"): f"{name}-serve-svc",
        ("Service", f"{BASE}-head-svc"): f"{name}-head-svc",
        ("Service", f"{BASE}-gateway-istio"): f"{name}-gateway-istio",
    }
    for document in documents:
        kind, old = document["kind"], document["metadata"]["name"]
        if _is_shared(document) or not re.match(rf"{BASE}(-|$)", old) or (kind, old) in names:
            continue
        rest = old.removeprefix(BASE)
        match kind, _scope(document):
            case (("PersistentVolume" | "ClusterRoleBinding"), _):
                names[kind, old] = deploy.namespace + rest
            case (("ClusterQueue" | "Queue"), _):
                names[kind, old] = deploy.namespace + rest.replace("-", ".", 1)  # no namespace contains a '.'
            case _, "run":
                names[kind, old] = of_run + rest
            case _, "deployment":
                names[kind, old] = name + rest
    return names


def _label(document: Document, labels: dict[str, str]) -> None:
    """Labels an object, its pods, and its selectors of pods by part, which would otherwise match other runs of the team."""
    document["metadata"]["labels"] = (document["metadata"].get("labels") or {}) | labels
    selectors = []
    for _, template in pod_templates(document):
        metadata = template.setdefault("metadata", {})
        metadata["labels"] = (metadata.get("labels") or {}) | labels
        spread = (template.get("spec") or {}).get("topologySpreadConstraints") or []
        selectors += [constraint.get("labelSelector") or {} for constraint in spread]
    if document["kind"] == "PodDisruptionBudget":
        selectors.append(document["spec"].get("selector") or {})
    for selector in selectors:
        if PART_LABEL in (selector.get("matchLabels") or {}):
            selector["matchLabels"] |= labels


def _refer(node: Any, names: Names, namespace: str) -> None:
    """Replaces the names of renamed objects and of the namespace in all references of an object."""
    for holder, field, kind in _references(node):
        value = holder[field]
        if kind == "Namespace" and isinstance(value, list):
            holder[field] = [namespace if each == BASE else each for each in value]
        elif kind == "Namespace":
            holder[field] = namespace if value == BASE else value
        elif kind == HOST:
            holder[field] = value.replace(HOST, f".{namespace}.svc")
        elif isinstance(value, str):
            holder[field] = names.get((kind, value), value)


def _references(node: Any) -> Iterator[tuple[Any, Any, str]]:
    """(holder, field, kind) of each field that names another object or a namespace. The field's value is a name or a list."""
    for i, item in enumerate(node) if isinstance(node, list) else ():
        if isinstance(item, str) and HOST in item:
            yield node, i, HOST
        yield from _references(item)
    if not isinstance(node, dict):
        return
    for field, value in node.items():
        match field, value:
            case (("configMap" | "configMapRef" | "configMapKeyRef"), {"name": str()}):
                yield value, "name", "ConfigMap"
            case "claimName", str():
                yield node, field, "PersistentVolumeClaim"
            case "serviceAccountName", str():
                yield node, field, "ServiceAccount"
            case "volumeName", str():
                yield node, field, "PersistentVolume"
            case "clusterQueue", str():
                yield node, field, "ClusterQueue"
            case (("namespace" | "matchNames"), (str() | list())):
                yield node, field, "Namespace"
            case "name", str() if isinstance(node.get("kind"), str):
                yield node, field, node["kind"]
            case (("parentRefs" | "backendRefs"), list()):
                default = "Gateway" if field == "parentRefs" else "Service"
                yield from ((each, "name", default) for each in value if "kind" not in each)
        if isinstance(value, str) and HOST in value:
            yield node, field, HOST
        if field in QUEUE_LABELS and isinstance(value, str):
            yield node, field, QUEUE_LABELS[field]
        if field == GATEWAY_LABEL and isinstance(value, str):
            yield node, field, "Gateway"
        if field == NAMESPACE_LABEL and isinstance(value, str):
            yield node, field, "Namespace"
    if node.get("key") == NAMESPACE_LABEL and isinstance(node.get("values"), list):
        yield node, "values", "Namespace"
    if node.get("sourceLabels") == ["namespace"] and isinstance(node.get("regex"), str):
        yield node, "regex", "Namespace"
    for value in list(node.values()):
        yield from _references(value)


def _separate_storage(volume: Document, namespace: str) -> None:
    """A NAS has a folder for each team, and a volume's handle must be unique. A bucket is the team's own: its policy admits the
    service accounts of one namespace."""
    source = volume["spec"].get("csi") or {}
    if source.get("driver") == "nasplugin.csi.alibabacloud.com":
        source["volumeHandle"] = volume["metadata"]["name"]
        source["volumeAttributes"]["path"] = re.sub(rf"/{BASE}$", f"/{namespace}", source["volumeAttributes"]["path"])
