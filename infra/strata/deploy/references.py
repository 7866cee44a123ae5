"""Validates references between objects: names must exist, selectors must match pods, ports must be declared."""

from collections.abc import Iterator
from typing import Any

from strata.deploy.documents import RAY_KINDS, Document, cluster_spec, containers, part, pod_templates, title
from strata.deploy.names import PARTS
from strata.deploy.problem import Finding, dotted

# Created by hand, because credentials do not belong in a repository; see the cluster guides.
FROM_OUTSIDE = {("Secret", name) for name in ("strata-link", "strata-api-keys", "strata-redis")}
# Labels that KubeRay sets on pods, with values known only at run time.
VALUE_UNKNOWN = ("ray.io/cluster", "ray.io/identifier", "ray.io/serve", "ray.io/originated-from-cr-name")
OUR_LABELS = ("ray.io/", "strata.dev/")
SHARED_VOLUMES = ("persistentVolumeClaim", "csi", "nfs")


def findings(documents: list[Document]) -> Iterator[tuple[Document, Finding]]:
    there = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    whole = {part(document) for document in documents}.issuperset(PARTS)
    seen = set()
    for document in documents:
        key = (document["kind"], document["metadata"].get("namespace"), document["metadata"]["name"])
        if key in seen:
            yield document, Finding("metadata.name", f"{title(document)} occurs twice")
        seen.add(key)
        yield from ((document, finding) for finding in _names(document, there))
        for path, template in pod_templates(document):
            yield from ((document, finding.below(path)) for finding in _template(template, document))
        yield from ((document, finding) for finding in _selects(document, documents, whole))


# Names


def _names(document: Document, there: dict[tuple[str, str], Document]) -> Iterator[Finding]:
    for path, kind, name, key in _references(document, ()):
        target = there.get((kind, name))
        if target is None and (kind, name) not in FROM_OUTSIDE:
            yield Finding(path, f"{kind} {name} is not among the objects")
        elif target is not None and key is not None:
            data = (target.get("data") or {}) | (target.get("stringData") or {}) | (target.get("binaryData") or {})
            if data and key not in data:
                yield Finding(path, f"{kind} {name} has no key {key}")


def _references(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str, str, str, str | None]]:
    """(path, kind, name, key) of each required reference in an object."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from _references(item, (*path, i))
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
                case "secret" if "secretName" in value:
                    yield dotted(below), "Secret", value["secretName"], None
                case "configMap" if "name" in value:
                    yield dotted(below), "ConfigMap", value["name"], None
                case "persistentVolumeClaim" if "claimName" in value:
                    yield dotted(below), "PersistentVolumeClaim", value["claimName"], None
        elif field == "serviceAccountName" and isinstance(value, str):
            yield dotted(below), "ServiceAccount", value, None
        yield from _references(value, below)


# Pod templates, which Kubernetes validates only when it creates a pod


def _template(template: Document, document: Document) -> Iterator[Finding]:
    volumes = {volume["name"]: volume for volume in template["spec"].get("volumes") or []}
    if document["kind"] == "StatefulSet":
        claims = document["spec"].get("volumeClaimTemplates") or []
        volumes |= {claim["metadata"]["name"]: {"persistentVolumeClaim": {}} for claim in claims}
    for path, container in containers(template):
        yield from (finding.below(path) for finding in _container(container, volumes))
        if document["kind"] in RAY_KINDS:
            yield from (finding.below(path) for finding in _home(container, volumes))


def _container(container: Document, volumes: dict[str, Document]) -> Iterator[Finding]:
    image = container.get("image") or ""
    last = image.rpartition("/")[2]
    if not image:
        yield Finding("image", "is not set")
    elif "@" not in last and (":" not in last or last.endswith(":latest")):
        yield Finding("image", f"{image} has no immutable tag or digest")
    for i, mount in enumerate(container.get("volumeMounts") or []):
        if mount["name"] not in volumes:
            yield Finding(f"volumeMounts[{i}].name", f"the pod has no volume {mount['name']}")
    ports = {port.get("name") for port in container.get("ports") or []}
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        port = ((container.get(probe) or {}).get("httpGet") or {}).get("port")
        if isinstance(port, str) and port not in ports:
            yield Finding(f"{probe}.httpGet.port", f"the container has no port named {port}")


def _home(container: Document, volumes: dict[str, Document]) -> Iterator[Finding]:
    """Requires STRATA_HOME on shared storage: runs must be visible to all pods and outlive them."""
    variables = {variable["name"]: variable.get("value") for variable in container.get("env") or []}
    home = variables.get("STRATA_HOME")
    if home is None:
        return
    holding = [
        mount
        for mount in container.get("volumeMounts") or []
        if home == mount["mountPath"] or home.startswith(mount["mountPath"].rstrip("/") + "/")
    ]
    if not any(set(SHARED_VOLUMES) & set(volumes.get(mount["name"], {})) for mount in holding):
        yield Finding("env", f"STRATA_HOME={home} is not on shared storage: no shared volume is mounted there")


# Selectors


def _selects(document: Document, documents: list[Document], whole: bool) -> Iterator[Finding]:
    """Requires that selectors match pods and their ports. Monitors are checked only if all parts are present (`whole`): a single
    part may lack the pods that they select."""
    kind, spec = document["kind"], document.get("spec") or {}
    match kind:
        case "PodDisruptionBudget":
            path, selector, ports = "spec.selector", spec.get("selector") or {}, []
        case "Service":
            path, selector = "spec.selector", {"matchLabels": spec.get("selector") or {}}
            ports = [(f"spec.ports[{i}].targetPort", port.get("targetPort")) for i, port in enumerate(spec.get("ports") or [])]
        case "PodMonitor" | "PodMonitoring" if whole and _selects_our_pods(spec):
            path, selector, key = "spec.selector", spec.get("selector") or {}, _endpoints(kind)
            ports = [(f"spec.{key}[{i}].port", endpoint.get("port")) for i, endpoint in enumerate(spec.get(key) or [])]
        case _:
            return
    if not selector.get("matchLabels") and not selector.get("matchExpressions"):
        return
    found = [template for other in documents for template, labels in _labelled(other) if _matches(selector, labels)]
    if not found:
        yield Finding(path, "no pod of these objects has these labels")
        return
    inside = [container for template in found for _, container in containers(template)]
    opened = {port.get("name") for container in inside for port in container.get("ports") or []}
    for port_path, port in ports:
        if isinstance(port, str) and port not in opened:
            yield Finding(port_path, f"none of the selected pods has a port named {port}")


def _endpoints(kind: str) -> str:
    return "podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"


def _selects_our_pods(spec: Document) -> bool:
    """True if a monitor selects by our labels. Exporters and operators may be in other namespaces or not installed."""
    selector = spec.get("selector") or {}
    keys = [*(selector.get("matchLabels") or {}), *(each["key"] for each in selector.get("matchExpressions") or [])]
    return any(key.startswith(OUR_LABELS) for key in keys)


def _labelled(document: Document) -> Iterator[tuple[Document, dict[str, str | None]]]:
    """Pod templates with the labels of their pods, including KubeRay's; None stands for an unknown value."""
    found = cluster_spec(document)
    for path, template in pod_templates(document):
        labels: dict[str, str | None] = dict((template.get("metadata") or {}).get("labels") or {})
        if found and path.startswith(f"{found[0]}.headGroupSpec"):
            labels |= {"ray.io/node-type": "head", "ray.io/group": "headgroup"}
        elif found and path.startswith(f"{found[0]}.workerGroupSpecs"):
            i = int(path.removeprefix(f"{found[0]}.workerGroupSpecs[").partition("]")[0])
            labels |= {"ray.io/node-type": "worker", "ray.io/group": found[1]["workerGroupSpecs"][i]["groupName"]}
        if "ray.io/node-type" in labels:
            labels |= {"ray.io/is-ray-node": "yes", **dict.fromkeys(VALUE_UNKNOWN)}
        yield template, labels


def _matches(selector: Document, labels: dict[str, str | None]) -> bool:
    wanted = (selector.get("matchLabels") or {}).items()
    return all(key in labels and labels[key] in (None, value) for key, value in wanted) and all(
        _meets(expression, labels) for expression in selector.get("matchExpressions") or []
    )


def _meets(expression: Document, labels: dict[str, str | None]) -> bool:
    key, values = expression["key"], expression.get("values") or []
    match expression["operator"]:
        case "In":
            return key in labels and (labels[key] is None or labels[key] in values)
        case "NotIn":
            return labels.get(key) is None or labels[key] not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels
