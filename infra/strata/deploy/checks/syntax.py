"""Syntax and lengths of names, labels and annotations, which schemas leave to the server."""

import re
from collections.abc import Iterator
from typing import Any

from strata.deploy.documents import Document, pod_templates
from strata.deploy.problem import Finding

LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DNS_LABEL = re.compile(LABEL)
DNS_SUBDOMAIN = re.compile(rf"{LABEL}(\.{LABEL})*")
PATH_SEGMENT = re.compile(r"(?!\.\.?$)[^/%]+")
QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
# Names that become labels or host names of pods are shorter. CronJobs and StatefulSets append to the names of their pods.
LONGEST = {"Namespace": 63, "Service": 63, "CronJob": 52, "StatefulSet": 52, "Deployment": 63, "DaemonSet": 63, "Job": 63}
RBAC = ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
ANNOTATION_BYTES = 256 * 1024
CONFIG_MAP_BYTES = 1024 * 1024
DATA_KEY = re.compile(r"(?!\.\.?$)[-._a-zA-Z0-9]{1,253}")


def findings(document: Document) -> Iterator[Finding]:
    kind, metadata = document["kind"], document["metadata"]
    yield from _name(kind, metadata["name"])
    if "namespace" in metadata and not is_label(metadata["namespace"]):
        yield Finding("metadata.namespace", f"'{metadata['namespace']}' is not a DNS label of up to 63 characters")
    yield from (finding.below("metadata") for finding in _metadata(metadata))
    for path, template in pod_templates(document):
        if template is not document:
            yield from (finding.below(f"{path}.metadata") for finding in _metadata(template.get("metadata") or {}))
        selector = (template.get("spec") or {}).get("nodeSelector") or {}
        yield from (finding.below(f"{path}.spec.nodeSelector") for finding in _labels(selector))
    yield from _selectors(document.get("spec"), "spec")
    if kind in ("ConfigMap", "Secret"):
        yield from _data(document)


def is_label(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= 63 and DNS_LABEL.fullmatch(text) is not None


def is_subdomain(text: str) -> bool:
    return len(text) <= 253 and DNS_SUBDOMAIN.fullmatch(text) is not None


def _name(kind: str, name: str) -> Iterator[Finding]:
    most = LONGEST.get(kind, 253)
    if len(name) > most:
        yield Finding("metadata.name", f"has {len(name)} characters; a {kind} may have {most}")
    elif kind in RBAC:
        if not PATH_SEGMENT.fullmatch(name):
            yield Finding("metadata.name", f"'{name}' must not contain '/' or '%'")
    elif not (is_label(name) if most <= 63 and kind in ("Namespace", "Service") else is_subdomain(name)):
        yield Finding("metadata.name", f"'{name}' is not a DNS name: lowercase letters, digits, '-' and '.'")


def _metadata(metadata: Document) -> Iterator[Finding]:
    yield from (finding.below("labels") for finding in _labels(metadata.get("labels") or {}))
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        if not _is_key(key.lower()):
            yield Finding(f"annotations.{key}", "is not a valid key: [prefix/]name, with a name of up to 63 characters")
    size = sum(len(key.encode()) + len(str(value).encode()) for key, value in annotations.items())
    if size > ANNOTATION_BYTES:
        yield Finding("annotations", f"have {size} bytes together; the server allows {ANNOTATION_BYTES}")


def _labels(labels: Document) -> Iterator[Finding]:
    for key, value in labels.items():
        if not _is_key(key):
            yield Finding(key, "is not a valid key: [prefix/]name, with a name of up to 63 characters")
        if not is_label_value(value):
            yield Finding(key, f"'{value}' is not a label's value: up to 63 letters, digits, '-', '_' and '.'")


def is_label_value(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 63 and (value == "" or QUALIFIED.fullmatch(value) is not None)


def _is_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    return len(name) <= 63 and QUALIFIED.fullmatch(name) is not None and (not slash or is_subdomain(prefix))


def _selectors(node: Any, path: str) -> Iterator[Finding]:
    """Label selectors anywhere in an object: their labels, operators and values."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from _selectors(item, f"{path}[{i}]")
    if not isinstance(node, dict):
        return
    if isinstance(node.get("matchLabels"), dict):
        yield from (finding.below(f"{path}.matchLabels") for finding in _labels(node["matchLabels"]))
    for field, value in node.items():
        if field != "matchExpressions":
            yield from _selectors(value, f"{path}.{field}")
            continue
        for i, expression in enumerate(value if isinstance(value, list) else []):
            yield from (finding.below(f"{path}.matchExpressions[{i}]") for finding in _expression(expression))


def _expression(expression: Document) -> Iterator[Finding]:
    operator, values = expression.get("operator"), expression.get("values")
    if operator in ("In", "NotIn") and not values:
        yield Finding("values", f"must not be empty with {operator}")
    elif operator in ("Exists", "DoesNotExist") and values:
        yield Finding("values", f"must be empty with {operator}")
    elif operator not in ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"):
        yield Finding("operator", f"'{operator}' is not one of In, NotIn, Exists and DoesNotExist")


def _data(document: Document) -> Iterator[Finding]:
    entries = [
        (field, key, value)
        for field in ("data", "binaryData", "stringData")
        for key, value in (document.get(field) or {}).items()
    ]
    for field, key, _ in entries:
        if not DATA_KEY.fullmatch(key):
            yield Finding(f"{field}.{key}", "is not a valid key: up to 253 letters, digits, '-', '_' and '.'")
    size = sum(len(str(value).encode()) for _, _, value in entries)
    if size > CONFIG_MAP_BYTES:
        yield Finding("data", f"has {size} bytes; the server allows {CONFIG_MAP_BYTES}")
