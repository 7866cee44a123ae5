"""Selectors: each must match pods of its namespace, and the ports that it names must be declared."""

from collections import Counter
from collections.abc import Iterator

from strata.deploy.documents import Document, cluster_spec, containers, part, pod_templates
from strata.deploy.names import PARTS
from strata.deploy.problem import Finding

# Labels that KubeRay sets on pods, with values known only at run time.
VALUE_UNKNOWN = ("ray.io/cluster", "ray.io/identifier", "ray.io/serve", "ray.io/originated-from-cr-name")
OUR_LABELS = ("ray.io/", "strata.dev/")
ENDPOINTS = {"PodMonitor": "podMetricsEndpoints", "PodMonitoring": "endpoints", "ClusterPodMonitoring": "endpoints"}

Labels = dict[str, str | None]


def findings(documents: list[Document], whole: bool | None = None) -> Iterator[tuple[Document, Finding]]:
    """`whole`: all parts are among the objects. By default their labels tell."""
    whole = {part(document) for document in documents}.issuperset(PARTS) if whole is None else whole
    for document in documents:
        yield from ((document, finding) for finding in _workload(document))
        yield from ((document, finding) for finding in _service_ports(document))
        yield from ((document, finding) for finding in _budget(document))
        yield from ((document, finding) for finding in _selects(document, documents, whole))


def _workload(document: Document) -> Iterator[Finding]:
    """Requires that a Deployment, StatefulSet or DaemonSet selects its own pods."""
    if document["kind"] not in ("Deployment", "StatefulSet", "DaemonSet"):
        return
    spec = document["spec"]
    labels = (spec["template"].get("metadata") or {}).get("labels") or {}
    if spec.get("selector") and not matches(spec["selector"], labels):
        yield Finding("spec.selector", "does not match the labels of spec.template")


def _service_ports(document: Document) -> Iterator[Finding]:
    if document["kind"] != "Service":
        return
    ports = (document.get("spec") or {}).get("ports") or []
    names = [port.get("name") for port in ports]
    if len(ports) > 1 and not all(names):
        yield Finding("spec.ports", "each needs a name, because there are several")
    for name, count in Counter(name for name in names if name).items():
        if count > 1:
            yield Finding("spec.ports", f"the name {name} occurs twice")
    for (number, protocol), count in Counter((port["port"], port.get("protocol", "TCP")) for port in ports).items():
        if count > 1:
            yield Finding("spec.ports", f"the port {number} ({protocol}) occurs twice")


def _budget(document: Document) -> Iterator[Finding]:
    spec = document.get("spec") or {}
    if document["kind"] == "PodDisruptionBudget" and None not in (spec.get("minAvailable"), spec.get("maxUnavailable")):
        yield Finding("spec", "minAvailable and maxUnavailable exclude each other")


def _selects(document: Document, documents: list[Document], whole: bool) -> Iterator[Finding]:
    """Requires that selectors match pods and their ports. Monitors and network policies are checked only if all parts are present
    (`whole`): a single part may lack the pods that they select."""
    kind, spec = document["kind"], document.get("spec") or {}
    own = document["metadata"].get("namespace")
    namespaces: list[str | None] | None = [own]  # None stands for all
    ports: list[tuple[str, object]] = []
    path, selector = "spec.selector", spec.get("selector") or {}
    match kind:
        case "PodDisruptionBudget":
            pass
        case "Service":
            selector = {"matchLabels": selector}
            ports = [(f"spec.ports[{i}].targetPort", port.get("targetPort")) for i, port in enumerate(spec.get("ports") or [])]
        case "NetworkPolicy" if whole and _selects_our_pods(spec.get("podSelector") or {}):
            path, selector = "spec.podSelector", spec["podSelector"]
        case "PodMonitor" | "PodMonitoring" | "ClusterPodMonitoring" if whole and _selects_our_pods(selector):
            ports = [
                (f"spec.{ENDPOINTS[kind]}[{i}].port", endpoint.get("port"))
                for i, endpoint in enumerate(spec.get(ENDPOINTS[kind]) or [])
            ]
            other = spec.get("namespaceSelector") or {}
            namespaces = None if kind == "ClusterPodMonitoring" or other.get("any") else other.get("matchNames") or [own]
        case _:
            return
    if not selector.get("matchLabels") and not selector.get("matchExpressions"):
        return
    found = [
        template
        for each in documents
        if namespaces is None or each["metadata"].get("namespace") in namespaces
        for template, labels in _labelled(each)
        if matches(selector, labels)
    ]
    if not found:
        yield Finding(path, "no pod of these objects has these labels")
        return
    inside = [container for template in found for _, container in containers(template)]
    opened = {port.get("name") for container in inside for port in container.get("ports") or []}
    for port_path, port in ports:
        if isinstance(port, str) and port not in opened:
            yield Finding(port_path, f"none of the selected pods has a port named {port}")


def _selects_our_pods(selector: Document) -> bool:
    """True for selectors by our labels. Exporters, gateways and operators may be in other namespaces or not installed."""
    keys = [*(selector.get("matchLabels") or {}), *(each["key"] for each in selector.get("matchExpressions") or [])]
    return any(key.startswith(OUR_LABELS) for key in keys)


def _labelled(document: Document) -> Iterator[tuple[Document, Labels]]:
    """Pod templates with the labels of their pods, including KubeRay's; None stands for an unknown value."""
    found = cluster_spec(document)
    for path, template in pod_templates(document):
        labels: Labels = dict((template.get("metadata") or {}).get("labels") or {})
        if found and path.startswith(f"{found[0]}.headGroupSpec"):
            labels |= {"ray.io/node-type": "head", "ray.io/group": "headgroup"}
        elif found and path.startswith(f"{found[0]}.workerGroupSpecs"):
            i = int(path.removeprefix(f"{found[0]}.workerGroupSpecs[").partition("]")[0])
            labels |= {"ray.io/node-type": "worker", "ray.io/group": found[1]["workerGroupSpecs"][i]["groupName"]}
        if "ray.io/node-type" in labels:
            labels |= {"ray.io/is-ray-node": "yes", **dict.fromkeys(VALUE_UNKNOWN)}
        yield template, labels


def matches(selector: Document, labels: Labels) -> bool:
    wanted = (selector.get("matchLabels") or {}).items()
    return all(key in labels and labels[key] in (None, value) for key, value in wanted) and all(
        _meets(expression, labels) for expression in selector.get("matchExpressions") or []
    )


def _meets(expression: Document, labels: Labels) -> bool:
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
