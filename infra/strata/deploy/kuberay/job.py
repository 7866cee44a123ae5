"""Rules for RayJobs: submission, retries and deletion."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import yaml

from strata.deploy.documents import Document, StrictLoader
from strata.deploy.kuberay.cluster import autoscales, of_cluster, pod
from strata.deploy.problem import Finding

DELETION_ORDER = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")


def of_job(spec: Document, annotations: dict[str, str]) -> Iterator[Finding]:
    cluster, selector, mode = spec.get("rayClusterSpec"), spec.get("clusterSelector"), spec.get("submissionMode")
    shuts_down, retries = spec.get("shutdownAfterJobFinishes", False), spec.get("backoffLimit") or 0
    if spec.get("suspend") and not shuts_down:
        yield Finding("spec.suspend", "needs shutdownAfterJobFinishes: true")
    if spec.get("suspend") and selector:
        yield Finding("spec.suspend", "is not supported with clusterSelector")
    ttl = spec.get("ttlSecondsAfterFinished", 0)
    if ttl < 0:
        yield Finding("spec.ttlSecondsAfterFinished", f"{ttl} is negative")
    if ttl > 0 and not shuts_down:
        yield Finding("spec.ttlSecondsAfterFinished", "needs shutdownAfterJobFinishes: true")
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(key) is not None and spec[key] <= 0:
            yield Finding(f"spec.{key}", "must be positive")
    if retries < 0:
        yield Finding("spec.backoffLimit", f"{retries} is negative")
    if retries > 0 and mode == "InteractiveMode":
        yield Finding("spec.backoffLimit", "is not supported with InteractiveMode")
    if retries > 0 and selector:
        yield Finding("spec.backoffLimit", "is not supported with clusterSelector")
    if cluster is None and not selector:
        yield Finding("spec.rayClusterSpec", "must be set, or clusterSelector")
    if selector and not selector.get("ray.io/cluster"):
        yield Finding("spec.clusterSelector", "must name a cluster by ray.io/cluster")
    if mode == "SidecarMode":
        yield from _sidecar(spec)
    if cluster is not None:
        if (cluster.get("authOptions") or {}).get("enableK8sTokenAuth"):
            yield Finding("spec.rayClusterSpec.authOptions.enableK8sTokenAuth", "is not supported for a RayJob")
        yield from of_cluster(cluster, annotations, "spec.rayClusterSpec")
    yield from _runtime_environment(spec.get("runtimeEnvYAML") or "{}")
    if spec.get("deletionStrategy") is not None:
        yield from (finding.below("spec.deletionStrategy") for finding in _deletion(spec))


def _runtime_environment(text: str) -> Iterator[Finding]:
    try:
        if not isinstance(yaml.load(text, Loader=StrictLoader), dict):
            yield Finding("spec.runtimeEnvYAML", "is not a mapping")
    except yaml.YAMLError as error:
        yield Finding("spec.runtimeEnvYAML", f"is not valid YAML: {' '.join(str(error).split())}")


def _sidecar(spec: Document) -> Iterator[Finding]:
    for key in ("clusterSelector", "submitterPodTemplate", "submitterConfig"):
        if spec.get(key):
            yield Finding(f"spec.{key}", "is not supported in SidecarMode")
    head = (spec.get("rayClusterSpec") or {}).get("headGroupSpec") or {}
    if pod(head).get("restartPolicy", "Never") != "Never":
        yield Finding("spec.rayClusterSpec.headGroupSpec.template.spec.restartPolicy", "must be Never or unset in SidecarMode")


def _deletion(spec: Document) -> Iterator[Finding]:
    strategy = spec["deletionStrategy"]
    rules, success, failure = strategy.get("deletionRules") or [], strategy.get("onSuccess"), strategy.get("onFailure")
    shuts_down = spec.get("shutdownAfterJobFinishes", False)
    if rules and shuts_down:
        yield Finding("deletionRules", "must not be set together with spec.shutdownAfterJobFinishes")
    if rules and (success is not None or failure is not None):
        yield Finding("deletionRules", "must not be set together with onSuccess and onFailure")
    elif rules:
        yield from _deletion_rules(rules, spec)
    elif success is None or failure is None:
        yield Finding("", "needs both onSuccess and onFailure, or deletionRules")
    else:
        for key, chosen in (("onSuccess", success), ("onFailure", failure)):
            policy = chosen.get("policy")
            if policy is None:
                yield Finding(f"{key}.policy", "must be set")
            yield from (finding.below(f"{key}.policy") for finding in _deletion_policy(policy, spec))
            if policy == "DeleteNone" and shuts_down:
                yield Finding(f"{key}.policy", "DeleteNone contradicts spec.shutdownAfterJobFinishes")


def _deletion_rules(rules: list[Document], spec: Document) -> Iterator[Finding]:
    """Requires the deletion order: workers, then their cluster, then the job."""
    ttls: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for i, rule in enumerate(rules):
        condition, policy = rule.get("condition") or {}, rule.get("policy", "")
        statuses = [(key, condition[key]) for key in ("jobStatus", "jobDeploymentStatus") if condition.get(key)]
        if len(statuses) != 1:
            yield Finding(f"deletionRules[{i}].condition", "needs one of jobStatus and jobDeploymentStatus")
            continue
        ttl = condition.get("ttlSeconds", 0)
        if ttl < 0:
            yield Finding(f"deletionRules[{i}].condition.ttlSeconds", f"{ttl} is negative")
        yield from (finding.below(f"deletionRules[{i}].policy") for finding in _deletion_policy(policy, spec))
        if policy in ttls[statuses[0]]:
            yield Finding(f"deletionRules[{i}]", f"{policy} for {statuses[0][1]} occurs twice")
        ttls[statuses[0]][policy] = ttl
    for (_, status), by_policy in ttls.items():
        ordered = [(policy, by_policy[policy]) for policy in DELETION_ORDER if policy in by_policy]
        for (before, early), (after, late) in pairwise(ordered):
            if late < early:
                yield Finding("deletionRules", f"for {status}, {after} after {late} s would come before {before} after {early} s")


def _deletion_policy(policy: str | None, spec: Document) -> Iterator[Finding]:
    if spec.get("clusterSelector") and policy in ("DeleteCluster", "DeleteWorkers"):
        yield Finding("", f"{policy} is not supported with clusterSelector")
    if policy == "DeleteWorkers" and autoscales(spec.get("rayClusterSpec") or {}):
        yield Finding("", "DeleteWorkers is not supported with the autoscaler on")
