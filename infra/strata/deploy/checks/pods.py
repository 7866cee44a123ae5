"""Checks of pod templates, which Kubernetes validates only when it creates a pod."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from strata.deploy import quantities
from strata.deploy.checks import syntax
from strata.deploy.documents import RAY_KINDS, Document, containers, pod_templates
from strata.deploy.problem import Finding

SHARED_VOLUMES = ("persistentVolumeClaim", "csi", "nfs")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")
PROBES = ("readinessProbe", "livenessProbe", "startupProbe")
HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
ENVIRONMENT_NAME = re.compile(r"[^=\x00-\x1f\x7f]+")
# Resources that Kubernetes divides among containers, so requests may be fractions and less than limits.
DIVISIBLE = ("cpu", "memory", "ephemeral-storage", "storage")


def findings(document: Document) -> Iterator[Finding]:
    for path, template in pod_templates(document):
        prefix = f"{path}." if path else ""
        for finding in _template(template, document):
            yield Finding(prefix + finding.path, finding.message)
    for path, claim in _claims(document):
        resources = (claim.get("spec") or {}).get("resources") or {}
        yield from (finding.below(f"{path}.resources") for finding in _resources(resources))
    if document["kind"] == "PersistentVolume":
        for name, value in ((document.get("spec") or {}).get("capacity") or {}).items():
            if quantities.parse(value) is None:
                yield Finding(f"spec.capacity.{name}", f"'{value}' is not a quantity")


def _claims(document: Document) -> Iterator[tuple[str, Document]]:
    """Volume claims, with the paths of their specs."""
    if document["kind"] == "PersistentVolumeClaim":
        yield "spec", document
    if document["kind"] == "StatefulSet":
        for i, claim in enumerate(document["spec"].get("volumeClaimTemplates") or []):
            yield f"spec.volumeClaimTemplates[{i}].spec", claim


def _template(template: Document, document: Document) -> Iterator[Finding]:
    pod = template["spec"]
    if (pod.get("terminationGracePeriodSeconds") or 0) < 0:
        yield Finding("spec.terminationGracePeriodSeconds", f"{pod['terminationGracePeriodSeconds']} is negative")
    listed = pod.get("volumes") or []
    volumes = {volume["name"]: volume for volume in listed}
    if document["kind"] == "StatefulSet":
        volumes |= {claim["metadata"]["name"]: {"persistentVolumeClaim": {}} for _, claim in _claims(document)}
    yield from _twice("spec.volumes", [volume["name"] for volume in listed])
    for i, volume in enumerate(listed):
        yield from (finding.below(f"spec.volumes[{i}]") for finding in _volume(volume))
    inside = list(containers(template))
    yield from _twice("spec.containers", [container["name"] for _, container in inside])
    # Init containers end before the others start, and may use the same ports.
    yield from _twice("spec.containers", _port_names(pod.get("containers") or []), "the port name ")
    for path, container in inside:
        yield from (finding.below(path) for finding in _container(container, volumes))
        if document["kind"] in RAY_KINDS:
            yield from (finding.below(path) for finding in _home(container, volumes))


def _twice(path: str, names: list[Any], what: str = "") -> Iterator[Finding]:
    for name, count in Counter(names).items():
        if count > 1:
            yield Finding(path, f"{what}{name} occurs twice")


def _port_names(listed: list[Document]) -> list[str]:
    return [port["name"] for container in listed for port in container.get("ports") or [] if port.get("name")]


def _volume(volume: Document) -> Iterator[Finding]:
    sources = [key for key in volume if key != "name"]
    if not syntax.is_label(volume["name"]):
        yield Finding("name", f"'{volume['name']}' is not a DNS label of up to 63 characters")
    if len(sources) > 1:
        yield Finding("", f"{volume['name']} has more than one source: {', '.join(sources)}")
    limit = (volume.get("emptyDir") or {}).get("sizeLimit")
    if limit is not None and quantities.parse(limit) is None:
        yield Finding("emptyDir.sizeLimit", f"'{limit}' is not a quantity")


def _container(container: Document, volumes: dict[str, Document]) -> Iterator[Finding]:
    if not syntax.is_label(container["name"]):
        yield Finding("name", f"'{container['name']}' is not a DNS label of up to 63 characters")
    yield from _image(container.get("image") or "")
    yield from _mounts(container, volumes)
    yield from _environment(container)
    yield from _ports(container)
    yield from (finding.below("resources") for finding in _resources(container.get("resources") or {}))


def _image(image: str) -> Iterator[Finding]:
    last = image.rpartition("/")[2]
    if not image:
        yield Finding("image", "is not set")
    elif image != image.strip():
        yield Finding("image", f"'{image}' has spaces around it")
    elif "@" not in last and (":" not in last or last.endswith(":latest")):
        yield Finding("image", f"{image} has no immutable tag or digest")


def _mounts(container: Document, volumes: dict[str, Document]) -> Iterator[Finding]:
    mounts = container.get("volumeMounts") or []
    for i, mount in enumerate(mounts):
        if mount["name"] not in volumes:
            yield Finding(f"volumeMounts[{i}].name", f"the pod has no volume {mount['name']}")
    yield from _twice("volumeMounts", [mount["mountPath"] for mount in mounts])


def _environment(container: Document) -> Iterator[Finding]:
    variables = container.get("env") or []
    # The last one wins, without a message.
    yield from _twice("env", [variable["name"] for variable in variables])
    for i, variable in enumerate(variables):
        if not ENVIRONMENT_NAME.fullmatch(variable["name"]):
            yield Finding(f"env[{i}].name", f"'{variable['name']}' is not a variable's name")
        if variable.get("value") and variable.get("valueFrom"):
            yield Finding(f"env[{i}]", f"{variable['name']} has both value and valueFrom")
        if "valueFrom" in variable and len(variable["valueFrom"] or {}) != 1:
            yield Finding(f"env[{i}].valueFrom", f"{variable['name']} needs exactly one source")


def _ports(container: Document) -> Iterator[Finding]:
    ports = container.get("ports") or []
    yield from _twice("ports", [(port["containerPort"], port.get("protocol", "TCP")) for port in ports])
    names = {port.get("name") for port in ports}
    for i, port in enumerate(ports):
        if not 1 <= port["containerPort"] <= 65535:
            yield Finding(f"ports[{i}].containerPort", f"{port['containerPort']} is not between 1 and 65535")
        if port.get("name") and not (len(port["name"]) <= 15 and PORT_NAME.fullmatch(port["name"])):
            yield Finding(f"ports[{i}].name", f"'{port['name']}' is not a port's name: up to 15 of a-z, 0-9 and '-'")
    for probe in PROBES:
        handler = container.get(probe) or {}
        given = [key for key in HANDLERS if handler.get(key)]
        if probe in container and len(given) != 1:
            yield Finding(probe, f"needs exactly one of {', '.join(HANDLERS)}")
        for key in ("httpGet", "tcpSocket"):
            name = (handler.get(key) or {}).get("port")
            if isinstance(name, str) and name not in names:
                yield Finding(f"{probe}.{key}.port", f"the container has no port named {name}")


def _resources(resources: Document) -> Iterator[Finding]:
    parsed = {}
    for side in ("requests", "limits"):
        for name, value in (resources.get(side) or {}).items():
            amount = parsed[side, name] = quantities.parse(value)
            whole = name not in DIVISIBLE and not name.startswith("hugepages-")
            if amount is None:
                yield Finding(f"{side}.{name}", f"'{value}' is not a quantity")
            elif amount < 0:
                yield Finding(f"{side}.{name}", f"{value} is negative")
            elif whole and amount.denominator != 1:
                yield Finding(f"{side}.{name}", f"{value} is not a whole number")
            elif name == "cpu" and (amount * 1000).denominator != 1:
                yield Finding(f"{side}.{name}", f"{value} is finer than 1m")
    for name, request in (resources.get("requests") or {}).items():
        wanted, limit = parsed["requests", name], parsed.get(("limits", name))
        most = (resources.get("limits") or {}).get(name)
        if wanted is not None and limit is not None and wanted > limit:
            yield Finding(f"requests.{name}", f"{request} is more than the limit, {most}")
        elif wanted is not None and name not in DIVISIBLE and wanted != limit:
            yield Finding(f"requests.{name}", f"{request} is not the limit, {most}: {name} cannot be overcommitted")


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
