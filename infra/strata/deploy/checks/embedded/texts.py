"""YAML and JSON inside objects: data of ConfigMaps, annotations, variables and Ray's start parameters."""

import json
from collections.abc import Iterator
from typing import Any

import yaml

from strata.deploy.documents import Document, StrictLoader, cluster_spec, containers, pod_templates
from strata.deploy.problem import Finding

# Annotations that are always JSON, and those that are YAML (devices of GKE's network plugins). Others are JSON if they look so.
JSON_ANNOTATIONS = ("networking.gke.io/interfaces", "cloud.google.com/neg", "cloud.google.com/backend-config")
YAML_ANNOTATIONS = "devices.gke.io/container."
JSON_STARTS = ('{"', '["', "[{")
NUMBERS = ("num-cpus", "num-gpus", "memory", "object-store-memory")
INTERFACES, DEFAULT_INTERFACE = "networking.gke.io/interfaces", "networking.gke.io/default-interface"


def findings(document: Document) -> Iterator[Finding]:
    if document["kind"] == "ConfigMap":
        for key, text in (document.get("data") or {}).items():
            yield from (finding.below(f"data.{key}") for finding in parsed(key, text))
    yield from (finding.below("metadata") for finding in _annotations(document["metadata"]))
    for path, template in pod_templates(document):
        prefix = f"{path}." if path else ""
        if template is not document:
            yield from (finding.below(f"{prefix}metadata") for finding in _annotations(template.get("metadata") or {}))
        for inside, container in containers(template):
            yield from (finding.below(prefix + inside) for finding in _environment(container))
    yield from _start_parameters(document)
    if document["kind"] == "RayJob" and (document.get("spec") or {}).get("entrypointResources"):
        yield from (finding.below("spec.entrypointResources") for finding in _resources(document["spec"]["entrypointResources"]))


def parsed(name: str, text: str) -> Iterator[Finding]:
    """Checks a file's syntax by the end of its name."""
    if name.endswith(".json"):
        yield from _json(text)
    elif name.endswith((".yaml", ".yml")):
        yield from _yaml(text)


def _yaml(text: str) -> Iterator[Finding]:
    try:
        list(yaml.load_all(text, Loader=StrictLoader))
    except yaml.YAMLError as error:
        yield Finding("", f"is not valid YAML: {' '.join(str(error).split())}")


def _json(text: str) -> Iterator[Finding]:
    try:
        json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_number)
    except ValueError as error:
        yield Finding("", f"is not valid JSON: {error}")


def _distinct(pairs: list[tuple[str, Any]]) -> Document:
    found: Document = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key '{key}' occurs twice")
        found[key] = value
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _annotations(metadata: Document) -> Iterator[Finding]:
    annotations = metadata.get("annotations") or {}
    for key, text in annotations.items():
        path = f"annotations.{key}"
        if key in JSON_ANNOTATIONS or text.lstrip().startswith(JSON_STARTS):
            wrong = list(_json(text))
        else:
            wrong = list(_yaml(text)) if key.startswith(YAML_ANNOTATIONS) else []
        yield from (finding.below(path) for finding in wrong)
        if key == INTERFACES and not wrong:
            yield from (finding.below(path) for finding in _interfaces(json.loads(text), annotations.get(DEFAULT_INTERFACE)))


def _interfaces(interfaces: Any, default: str | None) -> Iterator[Finding]:
    """GKE's interfaces of a pod: a list of names and networks."""
    if not isinstance(interfaces, list) or not all(isinstance(each, dict) for each in interfaces):
        yield Finding("", "is not a list of interfaces")
        return
    names = [each.get("interfaceName") for each in interfaces]
    for i, each in enumerate(interfaces):
        for key in ("interfaceName", "network"):
            if not isinstance(each.get(key), str):
                yield Finding("", f"interface {i} has no {key}")
    for name in {name for name in names if names.count(name) > 1}:
        yield Finding("", f"the interface {name} occurs twice")
    if default is not None and default not in names:
        yield Finding("", f"has no interface {default}, which is the default")


def _environment(container: Document) -> Iterator[Finding]:
    for i, variable in enumerate(container.get("env") or []):
        if str(variable.get("value") or "").startswith(JSON_STARTS):
            yield from (finding.below(f"env[{i}].value") for finding in _json(variable["value"]))


def _start_parameters(document: Document) -> Iterator[Finding]:
    """rayStartParams: options of `ray start`, all of them strings, some of them numbers or JSON in quotes."""
    found = cluster_spec(document)
    if found is None:
        return
    path, cluster = found
    groups = [(f"{path}.headGroupSpec", cluster.get("headGroupSpec") or {})]
    groups += [(f"{path}.workerGroupSpecs[{i}]", group) for i, group in enumerate(cluster.get("workerGroupSpecs") or [])]
    for where, group in groups:
        parameters = group.get("rayStartParams") or {}
        for key in NUMBERS:
            if parameters.get(key) is not None and not str(parameters[key]).isdecimal():
                yield Finding(f"{where}.rayStartParams.{key}", f"'{parameters[key]}' is not a whole number")
        if parameters.get("resources"):
            yield from (finding.below(f"{where}.rayStartParams.resources") for finding in _resources(parameters["resources"]))


def _resources(text: str) -> Iterator[Finding]:
    """Ray resources as JSON. KubeRay puts the value into a shell command, so it may be in quotes with escapes."""
    try:
        value = json.loads(text)
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        inner = text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else ""
        try:
            value = json.loads(inner)
        except ValueError:
            yield Finding("", f"is not valid JSON in quotes: {text}")
            return
    if not isinstance(value, dict):
        yield Finding("", "is not an object of names and amounts")
        return
    for name, amount in value.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
            yield Finding("", f"the amount of {name} is not a number of at least 0")
