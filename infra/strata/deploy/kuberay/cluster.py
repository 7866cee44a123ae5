"""Rules for Ray clusters, alone or inside a RayJob or RayService."""

import math
import re
from collections.abc import Iterator
from typing import Any

from strata.deploy.documents import Document
from strata.deploy.problem import Finding

LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
FT_ANNOTATION = "ray.io/ft-enabled"
EXTERNAL_STORAGE_ANNOTATION = "ray.io/external-storage-namespace"
V2_ENV = "RAY_enable_autoscaler_v2"


def of_cluster(spec: Document, annotations: dict[str, str], path: str) -> Iterator[Finding]:
    head = spec.get("headGroupSpec") or {}
    if not _containers(head):
        yield Finding(f"{path}.headGroupSpec.template.spec.containers", "must not be empty")
        return
    yield from (finding.below(f"{path}.headGroupSpec") for finding in _group(head))
    for i, group in enumerate(spec.get("workerGroupSpecs") or []):
        yield from (finding.below(f"{path}.workerGroupSpecs[{i}]") for finding in _worker_group(group, spec))
    yield from (finding.below(f"{path}.workerGroupSpecs") for finding in _group_names(spec.get("workerGroupSpecs") or []))
    rules = (_fault_tolerance(spec, head, annotations), _autoscaler(spec, head), _auth(spec))
    yield from (finding.below(path) for rule in rules for finding in rule)


def _group(group: Document) -> Iterator[Finding]:
    start = group.get("rayStartParams") or {}
    both = [key for key in ("num-cpus", "num-gpus", "memory", "resources") if start.get(key)]
    if both and group.get("resources"):
        yield Finding("resources", f"must not be set together with rayStartParams.{both[0]}")
    if "labels" in start:
        yield Finding("rayStartParams.labels", "is not supported: use the group's labels")
    for key, value in (group.get("labels") or {}).items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            yield Finding("labels", f"'{key}: {value}' is not a valid label")


def _group_names(groups: list[Document]) -> Iterator[Finding]:
    """Requires names that can be labels of pods, each once. The operator does not check it, and counts pods by these labels."""
    names = [str(group.get("groupName", "")) for group in groups]
    for name in dict.fromkeys(names):
        if not name or not LABEL_VALUE.fullmatch(name):
            yield Finding("", f"the group name '{name}' is not a valid label")
        elif names.count(name) > 1:
            yield Finding("", f"the group name {name} occurs twice")


def _worker_group(group: Document, spec: Document) -> Iterator[Finding]:
    if not _containers(group):
        yield Finding("template.spec.containers", "must not be empty")
    yield from _bounds(group, autoscales(spec))
    yield from _group(group)
    idle = group.get("idleTimeoutSeconds")
    if idle is not None and idle < 0:
        yield Finding("idleTimeoutSeconds", f"{idle} is negative")
    elif idle is not None and not _runs_v2(spec):
        yield Finding("idleTimeoutSeconds", "needs autoscalerOptions.version: v2")
    if group.get("priority"):
        if _version(spec) < (2, 56, 0):
            yield Finding("priority", "needs rayVersion 2.56.0 or later")
        elif not _runs_v2(spec):
            yield Finding("priority", "needs autoscalerOptions.version: v2")
    if group.get("suspend") and autoscales(spec):
        yield Finding("suspend", "a group cannot be suspended with the autoscaler on")


def _bounds(group: Document, scaled: bool) -> Iterator[Finding]:
    least, most, replicas = group.get("minReplicas"), group.get("maxReplicas"), group.get("replicas")
    if not scaled and (least is None or most is None):
        yield Finding("minReplicas", "must be set, and maxReplicas too, without the autoscaler")
        return
    least, most = least or 0, math.inf if most is None else most
    for key, value in (("minReplicas", least), ("maxReplicas", most)):
        if value < 0:
            yield Finding(key, f"{value} is negative")
            return
    if least > most:
        yield Finding("minReplicas", f"{least} is more than maxReplicas, {most}")
    elif replicas is not None and not least <= replicas <= most:
        # The operator does not reject this, but uses the nearer bound without a message.
        yield Finding("replicas", f"{replicas} is not between minReplicas, {least}, and maxReplicas, {most}")


def _fault_tolerance(spec: Document, head: Document, annotations: dict[str, str]) -> Iterator[Finding]:
    options, start, environment = spec.get("gcsFaultToleranceOptions"), head.get("rayStartParams") or {}, ray_variables(head)
    env_path = "headGroupSpec.template.spec.containers[0].env"
    if start.get("redis-username") or "REDIS_USERNAME" in environment:
        yield Finding(env_path, "REDIS_USERNAME must be set as gcsFaultToleranceOptions.redisUsername")
    if options is None:
        if "RAY_REDIS_ADDRESS" in environment and annotations.get(FT_ANNOTATION, "").lower() != "true":
            yield Finding(env_path, "RAY_REDIS_ADDRESS needs gcsFaultToleranceOptions")
        return
    if annotations.get(FT_ANNOTATION):
        yield Finding("gcsFaultToleranceOptions", f"must not be set together with the annotation {FT_ANNOTATION}")
    if annotations.get(EXTERNAL_STORAGE_ANNOTATION):
        yield Finding("gcsFaultToleranceOptions", f"must not be set together with the annotation {EXTERNAL_STORAGE_ANNOTATION}")
    if start.get("redis-password"):
        yield Finding("headGroupSpec.rayStartParams.redis-password", "must be set as gcsFaultToleranceOptions.redisPassword")
    for variable, field in (("REDIS_PASSWORD", "redisPassword"), ("RAY_REDIS_ADDRESS", "redisAddress")):
        if variable in environment:
            yield Finding(env_path, f"{variable} must be set as gcsFaultToleranceOptions.{field}")
    if options.get("backend", "redis") == "rocksdb":
        yield Finding(
            "gcsFaultToleranceOptions.backend",
            "rocksdb requires the feature gate GCSFaultToleranceEmbeddedStorage, which is off by default",
        )
    elif options.get("storage") is not None:
        yield Finding("gcsFaultToleranceOptions.storage", "is for the rocksdb backend only")


def _autoscaler(spec: Document, head: Document) -> Iterator[Finding]:
    options = spec.get("autoscalerOptions") or {}
    switch = ray_variables(head).get(V2_ENV)
    env_path = "headGroupSpec.template.spec.containers[0].env"
    if not autoscales(spec) and switch is not None and switch.get("value") in ("1", "true"):
        yield Finding(env_path, f"{V2_ENV} needs enableInTreeAutoscaling: true")
    if autoscales(spec) and "version" in options and switch is not None:
        yield Finding(env_path, f"{V2_ENV} must not be set together with autoscalerOptions.version")
    if autoscales(spec) and options.get("version") == "v2":
        groups = [("headGroupSpec", head)]
        groups += [(f"workerGroupSpecs[{i}]", group) for i, group in enumerate(spec.get("workerGroupSpecs") or [])]
        for path, group in groups:
            if pod(group).get("restartPolicy", "Never") != "Never":
                yield Finding(f"{path}.template.spec.restartPolicy", "must be Never or unset with autoscaler v2")
    if (options.get("idleTimeoutSeconds") or 0) < 0:
        yield Finding("autoscalerOptions.idleTimeoutSeconds", "is negative")
    if any(variable["name"] == "KUBERAY_GEN_AUTOSCALER_START_CMD" for variable in options.get("env") or []):
        yield Finding("autoscalerOptions.env", "KUBERAY_GEN_AUTOSCALER_START_CMD is set by the operator")


def _auth(spec: Document) -> Iterator[Finding]:
    options = spec.get("authOptions") or {}
    by_kubernetes = options.get("enableK8sTokenAuth")
    if options.get("mode") != "token":
        if by_kubernetes:
            yield Finding("authOptions.enableK8sTokenAuth", "needs authOptions.mode: token")
        return
    if _version(spec) < (2, 52, 0):
        yield Finding("rayVersion", "must be 2.52.0 or later with authOptions.mode: token")
    if by_kubernetes and _version(spec) < (2, 55, 0):
        yield Finding("rayVersion", "must be 2.55.0 or later with authOptions.enableK8sTokenAuth")
    if by_kubernetes and options.get("secretName"):
        yield Finding("authOptions.secretName", "must not be set together with enableK8sTokenAuth")


def autoscales(spec: Document) -> bool:
    return spec.get("enableInTreeAutoscaling") is True


def _runs_v2(spec: Document) -> bool:
    switch = ray_variables(spec.get("headGroupSpec") or {}).get(V2_ENV) or {}
    return (spec.get("autoscalerOptions") or {}).get("version") == "v2" or switch.get("value") in ("1", "true")


def _version(spec: Document) -> tuple[int, ...]:
    """Ray version as a tuple; (0,) if it is not set, which is rejected like one that is too old."""
    numbers = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", str(spec.get("rayVersion", "")))
    return tuple(int(number or 0) for number in numbers.groups()) if numbers else (0,)


def pod(group: Document) -> Document:
    pod: Document = (group.get("template") or {}).get("spec") or {}
    return pod


def _containers(group: Document) -> list[Document]:
    return list(pod(group).get("containers") or [])


def ray_variables(group: Document) -> dict[str, Any]:
    """Environment variables of the first container, in which KubeRay runs Ray."""
    containers = _containers(group)
    return {variable["name"]: variable for variable in (containers[0].get("env") or [])} if containers else {}
