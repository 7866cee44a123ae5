"""References between objects: what an object names must be rendered with it, or exist on the cluster."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strata.deploy.documents import Document, pod_templates, title
from strata.deploy.problem import Finding, dotted

CLUSTER_SCOPED = {"Namespace", "PersistentVolume", "PriorityClass", "RuntimeClass", "StorageClass", "ClusterRole"}
CLUSTER_SCOPED |= {"ClusterIssuer", "GatewayClass", "Network", "GKENetworkParamSet", "Queue", "ClusterQueue", "Cohort"}
CLUSTER_SCOPED |= {"ResourceFlavor", "Topology", "AdmissionCheck", "ProvisioningRequestConfig", "WorkloadPriorityClass"}
# Kinds that must be rendered with the objects that name them. An administrator may create objects of other kinds, such as
# queues; credentials do not belong in manifests.
ALWAYS_RENDERED = ("ConfigMap", "ServiceAccount", "PersistentVolumeClaim", "Service", "Role")
NEVER_REQUIRED = ("Secret", "Namespace")
# Objects of every cluster, and of every cluster with the project that owns the kind.
BUILT_IN = {
    ("ServiceAccount", "default"),
    ("ConfigMap", "kube-root-ca.crt"),
    ("PriorityClass", "system-cluster-critical"),
    ("PriorityClass", "system-node-critical"),
    ("Queue", "default"),
    ("Network", "default"),
    ("Namespace", "default"),
    ("Namespace", "kube-system"),
}
LABELS = {
    "kueue.x-k8s.io/queue-name": "LocalQueue",
    "kueue.x-k8s.io/priority-class": "WorkloadPriorityClass",
    "volcano.sh/queue-name": "Queue",
    "ray.io/priority-class-name": "PriorityClass",
}
# Fields that hold the name of an object, anywhere in an object.
NAMES = {
    "serviceAccountName": "ServiceAccount",
    "priorityClassName": "PriorityClass",
    "runtimeClassName": "RuntimeClass",
    "topologyName": "Topology",
    "clusterQueue": "ClusterQueue",
}

Key = tuple[str, str | None, str]


@dataclass(frozen=True)
class Reference:
    path: str
    kind: str
    name: str
    namespace: str | None
    data_key: str | None = None  # of a ConfigMap or Secret

    @property
    def key(self) -> Key:
        return self.kind, None if self.kind in CLUSTER_SCOPED else self.namespace, self.name


def findings(documents: list[Document]) -> Iterator[tuple[Document, Finding]]:
    there = _there(documents)
    rendered = {kind for kind, _, _ in there}
    yield from _duplicates(documents)
    for document, reference in _references(documents):
        target = there.get(reference.key)
        if target is not None:
            yield from ((document, finding) for finding in _data_key(reference, target))
        elif _is_required(reference, rendered):
            yield document, Finding(reference.path, f"{reference.kind} {reference.name} is not among the objects")


def notes(documents: list[Document]) -> Iterator[tuple[Document, Finding]]:
    """References to objects that must exist on the cluster, each once."""
    there = _there(documents)
    rendered = {kind for kind, _, _ in there}
    seen = set()
    for document, reference in _references(documents):
        if reference.key not in there and reference.key not in seen and not _is_required(reference, rendered):
            seen.add(reference.key)
            where = f" in the namespace {reference.key[1]}" if reference.key[1] else ""
            yield document, Finding(reference.path, f"{reference.kind} {reference.name} must exist on the cluster{where}")


def _is_required(reference: Reference, rendered: set[str]) -> bool:
    """True if a missing object is an error. If other objects of its kind are rendered, it would have been rendered with them."""
    if reference.kind in NEVER_REQUIRED:
        return False
    return reference.kind in ALWAYS_RENDERED or reference.kind in rendered


def _there(documents: list[Document]) -> dict[Key, Document]:
    """Objects by key: the rendered ones, and empty ones for those that operators create for them."""
    there: dict[Key, Document] = {}
    for document in documents:
        kind, metadata, spec = document["kind"], document["metadata"], document.get("spec") or {}
        namespace, name = metadata.get("namespace"), metadata["name"]
        there[_key(document)] = document
        created: list[tuple[str, str]] = []
        match kind:
            case "RayService":
                created = [("Service", f"{name}-serve-svc"), ("Service", f"{name}-head-svc")]
                created += [("Gateway", f"{name}-gateway"), ("HTTPRoute", f"{name}-httproute")]
                options = (spec.get("upgradeStrategy") or {}).get("clusterUpgradeOptions") or {}
                created += [("Service", f"{name}-gateway-{options.get('gatewayClassName')}")]  # by Istio
            case "Gateway":
                created = [("Service", f"{name}-{spec.get('gatewayClassName')}")]  # by Istio
            case "RayCluster":
                created = [("Service", f"{name}-head-svc")]
            case "Certificate" if isinstance(spec.get("secretName"), str):
                created = [("Secret", spec["secretName"])]
        there |= {(other, namespace, created_name): {} for other, created_name in created}
    return there


def _key(document: Document) -> Key:
    kind, metadata = document["kind"], document["metadata"]
    return kind, None if kind in CLUSTER_SCOPED else metadata.get("namespace"), metadata["name"]


def _duplicates(documents: list[Document]) -> Iterator[tuple[Document, Finding]]:
    seen = set()
    for document in documents:
        key = (str(document.get("apiVersion", "")).rpartition("/")[0], *_key(document))
        if key in seen:
            yield document, Finding("metadata.name", f"{title(document)} occurs twice")
        seen.add(key)


def _data_key(reference: Reference, target: Document) -> Iterator[Finding]:
    data = (target.get("data") or {}) | (target.get("stringData") or {}) | (target.get("binaryData") or {})
    if data and reference.data_key is not None and reference.data_key not in data:
        yield Finding(reference.path, f"{reference.kind} {reference.name} has no key {reference.data_key}")


# Finding references


def _references(documents: list[Document]) -> Iterator[tuple[Document, Reference]]:
    for document in documents:
        namespace = document["metadata"].get("namespace")
        found = [*_by_metadata(document), *_by_kind(document), *_by_field(document, ())]
        for path, kind, name, data_key in found:
            reference = Reference(path, kind, name, namespace, data_key)
            if (kind, name) not in BUILT_IN and name:
                yield document, reference
        for path, kind, name, there in _in_other_namespaces(document):
            yield document, Reference(path, kind, name, there or namespace)


Found = tuple[str, str, str, str | None]


def _by_metadata(document: Document) -> Iterator[Found]:
    labels = document["metadata"].get("labels") or {}
    for label, kind in LABELS.items():
        if label in labels:
            yield f"metadata.labels.{label}", kind, labels[label], None
    if document["metadata"].get("namespace"):
        yield "metadata.namespace", "Namespace", document["metadata"]["namespace"], None
    for path, template in pod_templates(document):
        annotations = (template.get("metadata") or {}).get("annotations") or {}
        yield from _interfaces(annotations, f"{path}.metadata.annotations")


def _interfaces(annotations: Document, path: str) -> Iterator[Found]:
    """GKE's networks of a pod. A text that is not JSON is reported by the check of embedded texts."""
    key = "networking.gke.io/interfaces"
    try:
        interfaces = json.loads(annotations.get(key, "[]"))
    except json.JSONDecodeError:
        return
    for each in interfaces if isinstance(interfaces, list) else []:
        if isinstance(each, dict) and isinstance(each.get("network"), str):
            yield f"{path}.{key}", "Network", each["network"], None


def _by_kind(document: Document) -> Iterator[Found]:
    spec = document.get("spec") or {}
    match document["kind"]:
        case "ClusterQueue":
            for i, group in enumerate(spec.get("resourceGroups") or []):
                for j, flavor in enumerate(group.get("flavors") or []):
                    yield f"spec.resourceGroups[{i}].flavors[{j}].name", "ResourceFlavor", flavor["name"], None
            checks = (spec.get("admissionChecksStrategy") or {}).get("admissionChecks") or []
            for i, check in enumerate(checks):
                yield f"spec.admissionChecksStrategy.admissionChecks[{i}].name", "AdmissionCheck", check["name"], None
        case "AdmissionCheck" | "Network":
            field = "parameters" if document["kind"] == "AdmissionCheck" else "parametersRef"
            if spec.get(field):
                yield f"spec.{field}.name", spec[field]["kind"], spec[field]["name"], None
        case "StatefulSet" if spec.get("serviceName"):
            yield "spec.serviceName", "Service", spec["serviceName"], None
        case "PersistentVolumeClaim" if spec.get("volumeName"):
            yield "spec.volumeName", "PersistentVolume", spec["volumeName"], None
        case "Certificate":
            issuer = spec.get("issuerRef") or {}
            yield "spec.issuerRef.name", issuer.get("kind", "Issuer"), issuer.get("name", ""), None
        case "RoleBinding" | "ClusterRoleBinding":
            role = document.get("roleRef") or {}
            yield "roleRef.name", role.get("kind", ""), role.get("name", ""), None
        case "HealthCheckPolicy" | "GCPBackendPolicy" | "GCPGatewayPolicy":
            target = spec.get("targetRef") or {}
            yield "spec.targetRef.name", target.get("kind", ""), target.get("name", ""), None


def _in_other_namespaces(document: Document) -> Iterator[tuple[str, str, str, str | None]]:
    """(path, kind, name, namespace) of references that may name a namespace."""
    spec = document.get("spec") or {}
    match document["kind"]:
        case "HTTPRoute":
            for i, parent in enumerate(spec.get("parentRefs") or []):
                yield f"spec.parentRefs[{i}].name", parent.get("kind", "Gateway"), parent["name"], parent.get("namespace")
            for i, rule in enumerate(spec.get("rules") or []):
                for j, backend in enumerate(rule.get("backendRefs") or []):
                    path = f"spec.rules[{i}].backendRefs[{j}].name"
                    yield path, backend.get("kind", "Service"), backend["name"], backend.get("namespace")
        case "Gateway":
            for i, listener in enumerate(spec.get("listeners") or []):
                for j, secret in enumerate((listener.get("tls") or {}).get("certificateRefs") or []):
                    path = f"spec.listeners[{i}].tls.certificateRefs[{j}].name"
                    yield path, secret.get("kind", "Secret"), secret["name"], secret.get("namespace")
        case "RoleBinding" | "ClusterRoleBinding":
            for i, subject in enumerate(document.get("subjects") or []):
                if subject.get("kind") == "ServiceAccount":
                    yield f"subjects[{i}].name", "ServiceAccount", subject["name"], subject.get("namespace")


def _by_field(node: Any, path: tuple[str | int, ...]) -> Iterator[Found]:
    """References by the names of fields, anywhere in an object. Optional ones are left out."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from _by_field(item, (*path, i))
    if not isinstance(node, dict):
        return
    for field, value in node.items():
        below = (*path, field)
        if isinstance(value, dict) and not value.get("optional"):
            match field:
                case "secretKeyRef" | "secretRef":
                    yield dotted(below), "Secret", value.get("name", ""), value.get("key")
                case "configMapKeyRef" | "configMapRef":
                    yield dotted(below), "ConfigMap", value.get("name", ""), value.get("key")
                case "secret" if "secretName" in value or "name" in value:
                    yield dotted(below), "Secret", value.get("secretName") or value.get("name", ""), None
                case "configMap" if "name" in value:
                    yield dotted(below), "ConfigMap", value["name"], None
                    for i, item in enumerate(value.get("items") or []):
                        yield dotted((*below, "items", i)), "ConfigMap", value["name"], item.get("key")
                case "persistentVolumeClaim" if "claimName" in value:
                    yield dotted(below), "PersistentVolumeClaim", value["claimName"], None
        elif field in NAMES and isinstance(value, str):
            yield dotted(below), NAMES[field], value, None
        elif field == "imagePullSecrets" and isinstance(value, list):
            yield from ((dotted((*below, i)), "Secret", each.get("name", ""), None) for i, each in enumerate(value))
        yield from _by_field(value, below)
