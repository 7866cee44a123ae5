"""Pods that a namespace rejects, queues that Kueue rejects, and workloads that it never admits."""

from typing import Any

import pytest

from strata.deploy.checks import kueue, pod_security, quotas

Document = dict[str, Any]

HARDENED: Document = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def rejected(level: str | None, security: Document, **pod: Any) -> list[str]:
    labels = {pod_security.ENFORCE: level} if level else {}
    namespace = {"kind": "Namespace", "metadata": {"name": "n", "labels": labels}}
    container = {"name": "c", "image": "i:1", "securityContext": security, **pod.pop("container", {})}
    workload = {
        "kind": "DaemonSet",
        "metadata": {"name": "d", "namespace": "n"},
        "spec": {"template": {"spec": {"containers": [container], **pod}}},
    }
    pairs = list(pod_security.findings([workload, namespace]))
    assert all(document is workload and f"={level})" in finding.message for document, finding in pairs)
    prefix = "spec.template.spec."
    return [finding.path.removeprefix(prefix).removeprefix("containers[0].") for _, finding in pairs]


ADDED = "securityContext.capabilities.add"


@pytest.mark.parametrize(
    ("security", "pod", "path"),
    [
        ({}, {}, None),
        ({"privileged": True}, {}, "securityContext.privileged"),
        ({"capabilities": {"add": ["IPC_LOCK"]}}, {}, ADDED),
        ({"capabilities": {"add": ["SYS_ADMIN"], "drop": ["ALL"]}}, {}, ADDED),
        ({"capabilities": {"add": ["CHOWN"]}}, {}, None),
        ({"seccompProfile": {"type": "Unconfined"}}, {}, "securityContext.seccompProfile"),
        ({}, {"hostNetwork": True}, "hostNetwork"),
        ({}, {"hostPID": True}, "hostPID"),
        ({}, {"hostNetwork": False}, None),
        ({}, {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "volumes[0].hostPath"),
        ({}, {"container": {"ports": [{"containerPort": 1, "hostPort": 1}]}}, "ports[0].hostPort"),
    ],
)
def test_baseline(security: Document, pod: Document, path: str | None) -> None:
    assert rejected("baseline", security, **pod) == ([path] if path else [])
    assert rejected("privileged", security, **pod) == rejected(None, security, **pod) == []


@pytest.mark.parametrize(
    ("changes", "pod", "path"),
    [
        ({}, {}, None),
        ({"allowPrivilegeEscalation": True}, {}, "securityContext.allowPrivilegeEscalation"),
        ({"allowPrivilegeEscalation": None}, {}, "securityContext.allowPrivilegeEscalation"),
        ({"runAsNonRoot": False}, {}, "securityContext.runAsNonRoot"),
        ({"runAsUser": 0}, {}, "securityContext.runAsUser"),
        ({"capabilities": {}}, {}, "securityContext.capabilities.drop"),
        ({"capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}, {}, None),
        ({"capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}}, {}, ADDED),
        ({"seccompProfile": None}, {}, "securityContext.seccompProfile"),
        ({"seccompProfile": None}, {"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}}, None),
        ({}, {"volumes": [{"name": "v", "nfs": {}}]}, "volumes[0]"),
        ({}, {"volumes": [{"name": "v", "emptyDir": {}}]}, None),
    ],
)
def test_restricted(changes: Document, pod: Document, path: str | None) -> None:
    assert rejected("restricted", HARDENED | changes, **pod) == ([path] if path else [])
    assert rejected("baseline", HARDENED | changes, **pod) == []


def test_levels_are_known() -> None:
    namespace = {"kind": "Namespace", "metadata": {"name": "n", "labels": {pod_security.ENFORCE: "basline"}}}
    [(_, finding)] = pod_security.findings([namespace])
    assert finding.path == f"metadata.labels.{pod_security.ENFORCE}"


# Quotas


def cluster(workers: int = 2, hosts: int = 1, **worker: str) -> Document:
    def group(resources: Document) -> Document:
        return {"template": {"spec": {"containers": [{"name": "c", "resources": {"requests": resources}}]}}}

    spec = {
        "headGroupSpec": group({"cpu": "1"}),
        "workerGroupSpecs": [{"replicas": workers, "numOfHosts": hosts, **group({"cpu": "2", **worker})}],
    }
    labels = {"kueue.x-k8s.io/queue-name": "local"}
    return {"kind": "RayCluster", "metadata": {"name": "r", "namespace": "n", "labels": labels}, "spec": spec}


def queues(*flavors: Document, **spec: Any) -> list[Document]:
    listed = [
        {"name": f"f{i}", "resources": [{"name": name, "nominalQuota": quota} for name, quota in flavor.items()]}
        for i, flavor in enumerate(flavors)
    ]
    return [
        {"kind": "LocalQueue", "metadata": {"name": "local", "namespace": "n"}, "spec": {"clusterQueue": "big"}},
        {"kind": "ClusterQueue", "metadata": {"name": "big"}, "spec": {"resourceGroups": [{"flavors": listed}], **spec}},
    ]


def waiting(*objects: Document) -> list[str]:
    return [finding.message for _, finding in quotas.findings(list(objects))]


@pytest.mark.parametrize(
    ("workload", "flavors", "expected"),
    [
        (cluster(), [{"cpu": "5"}], []),
        (cluster(), [{"cpu": "4999m"}], ["requests 5 cpu; ClusterQueue big has 4.999"]),
        (cluster(), [{"cpu": "3"}, {"cpu": "2"}], []),
        (cluster(hosts=2), [{"cpu": "8"}], ["requests 9 cpu; ClusterQueue big has 8"]),
        (cluster(memory="1Gi"), [{"cpu": "9"}], ["requests memory, which ClusterQueue big does not cover"]),
        (cluster(memory="0"), [{"cpu": "9"}], []),
        (cluster(41, **{"ephemeral-storage": "50Gi"}), [{"cpu": "99", "ephemeral-storage": "2Ti"}], ["2.20117e+12"]),
        (cluster(40, **{"ephemeral-storage": "50Gi"}), [{"cpu": "99", "ephemeral-storage": "2Ti"}], []),
    ],
)
def test_a_queue_holds_its_workloads(workload: Document, flavors: list[Document], expected: list[str]) -> None:
    found = waiting(workload, *queues(*flavors))
    assert len(found) == len(expected)
    assert all(part in message for part, message in zip(expected, found, strict=True))


def test_cohorts_lend() -> None:
    assert waiting(cluster(), *queues({"cpu": "1"}, cohortName="all")) == []
    assert waiting(cluster(), *queues({"memory": "1"}, cohortName="all")) != [], "a cohort lends only covered resources"
    for limit, waits in (("4", False), ("3999m", True), ("0", True)):
        objects = queues({"cpu": "1"}, cohortName="all")
        objects[1]["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["borrowingLimit"] = limit
        assert bool(waiting(cluster(), *objects)) is waits


def test_queues_of_other_namespaces_are_unknown() -> None:
    assert waiting(cluster()) == []
    local, big = queues({"cpu": "1"})
    local["metadata"]["namespace"] = "other"
    assert waiting(cluster(), local, big) == []


def test_the_pod_that_submits_a_job_counts() -> None:
    workload = cluster()
    container = {"name": "s", "resources": {"requests": {"cpu": "1"}}}
    spec = {"rayClusterSpec": workload["spec"], "submitterPodTemplate": {"spec": {"containers": [container]}}}
    job = {**workload, "kind": "RayJob", "spec": spec}
    assert waiting(job, *queues({"cpu": "6"})) == []
    assert waiting(job, *queues({"cpu": "5"})) == ["requests 6 cpu; ClusterQueue big has 5"]


def test_limits_are_requests_if_there_are_none() -> None:
    workload = cluster()
    container = workload["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"cpu": "4"}}
    assert waiting(workload, *queues({"cpu": "7"})) == ["requests 8 cpu; ClusterQueue big has 7"]


# Queues

CPU, MEMORY = {"name": "cpu", "nominalQuota": "4"}, {"name": "memory", "nominalQuota": "1Gi"}


def group(*resources: Document, name: str = "f", covered: tuple[str, ...] = ("cpu", "memory")) -> Document:
    return {"coveredResources": list(covered), "flavors": [{"name": name, "resources": list(resources)}]}


def refused(kind: str = "ClusterQueue", **spec: Any) -> list[tuple[str, str]]:
    document = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": "q"}, "spec": spec}
    return [(finding.path.removeprefix("spec."), finding.message) for finding in kueue.findings(document)]


GROUPS = "resourceGroups[0]"
FIRST = f"{GROUPS}.flavors[0].resources[0]"


@pytest.mark.parametrize(
    ("groups", "path"),
    [
        ([group(CPU, MEMORY)], None),
        ([group(MEMORY, CPU)], f"{GROUPS}.flavors[0].resources"),
        ([group(CPU)], f"{GROUPS}.flavors[0].resources"),
        ([group(CPU, CPU, covered=("cpu", "cpu"))], f"{GROUPS}.coveredResources"),
        ([group(CPU, covered=("cpu",)), group(MEMORY, name="g", covered=("memory",))], None),
        ([group(CPU, covered=("cpu",)), group(MEMORY, covered=("memory",))], "resourceGroups[1].flavors[0].name"),
        ([group(CPU, covered=("cpu",)), group(CPU, name="g", covered=("cpu",))], "resourceGroups[1].coveredResources"),
        ([group({**CPU, "nominalQuota": "-1"}, MEMORY)], f"{FIRST}.nominalQuota"),
        ([group({**CPU, "nominalQuota": "4 cores"}, MEMORY)], f"{FIRST}.nominalQuota"),
        ([group({**CPU, "nominalQuota": "0"}, MEMORY)], None),
    ],
)
def test_resources_of_queues(groups: list[Document], path: str | None) -> None:
    assert [where for where, _ in refused(resourceGroups=groups)] == ([path] if path else [])
    assert [where for where, _ in refused("Cohort", resourceGroups=groups)] == ([path] if path else [])


@pytest.mark.parametrize(
    ("limits", "cohort", "path"),
    [
        ({"borrowingLimit": "9"}, True, None),
        ({"borrowingLimit": "9"}, False, "borrowingLimit"),
        ({"borrowingLimit": "-1"}, True, "borrowingLimit"),
        ({"lendingLimit": "4"}, True, None),
        ({"lendingLimit": "4001m"}, True, "lendingLimit"),
        ({"lendingLimit": "1"}, False, "lendingLimit"),
    ],
)
def test_limits_of_queues(limits: Document, cohort: bool, path: str | None) -> None:
    groups = [group({**CPU, **limits}, MEMORY)]
    spec = {"cohortName": "c"} if cohort else {}
    assert [where for where, _ in refused(resourceGroups=groups, **spec)] == ([f"{FIRST}.{path}"] if path else [])


def test_a_cohort_may_lend_more_than_its_own() -> None:
    assert refused("Cohort", parentName="all", resourceGroups=[group({**CPU, "lendingLimit": "9"}, MEMORY)]) == []


def test_admission_checks_and_local_queues() -> None:
    checks = {"admissionChecks": [{"name": "c", "onFlavors": ["f", "g"]}]}
    found = refused(resourceGroups=[group(CPU, MEMORY)], admissionChecksStrategy=checks)
    assert found == [("admissionChecksStrategy.admissionChecks[0].onFlavors", "g is not a flavor of this queue")]
    assert [path for path, _ in refused("LocalQueue")] == ["clusterQueue"]
    assert refused("LocalQueue", clusterQueue="q") == []
