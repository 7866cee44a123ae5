"""Pod templates, names, labels and quantities: what the server refuses beyond the schemas."""

from fractions import Fraction
from typing import Any

import pytest

from strata.deploy import quantities
from strata.deploy.checks import choices, pods, syntax

Document = dict[str, Any]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        (1, 1),
        (1.5, Fraction(3, 2)),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("1.", 1),
        ("+1", 1),
        ("-1", -1),
        ("100m", Fraction(1, 10)),
        ("1u", Fraction(1, 10**6)),
        ("1n", Fraction(1, 10**9)),
        ("1k", 1000),
        ("1Ki", 1024),
        ("2M", 2 * 10**6),
        ("1.5Gi", 3 * 2**29),
        ("1Ti", 2**40),
        ("1P", 10**15),
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1e-3", Fraction(1, 1000)),
        ("1K", None),
        ("1 Gi", None),
        ("1gi", None),
        ("Gi", None),
        ("", None),
        ("1GiB", None),
        ("1e", None),
        ("٣", None),
        (True, None),
        (None, None),
    ],
)
def test_quantities(text: Any, value: Any) -> None:
    assert quantities.parse(text) == value


def template(container: Document | None = None, **pod: Any) -> Document:
    return {"spec": {"containers": [{"name": "c", "image": "strata:1", **(container or {})}], **pod}}


def found(container: Document | None = None, kind: str = "Deployment", **pod: Any) -> list[tuple[str, str]]:
    document = {"kind": kind, "metadata": {"name": "d"}, "spec": {"template": template(container, **pod)}}
    return [(finding.path.removeprefix("spec.template.spec."), finding.message) for finding in pods.findings(document)]


@pytest.mark.parametrize(
    ("requests", "limits", "path", "message"),
    [
        ({"cpu": "1", "memory": "1Gi"}, {"cpu": "1", "memory": "1Gi"}, None, None),
        ({"cpu": "1"}, {"cpu": "1000m"}, None, None),
        ({"cpu": "1001m"}, {"cpu": "1"}, "requests.cpu", "1001m is more than the limit, 1"),
        ({"memory": "1025Mi"}, {"memory": "1Gi"}, "requests.memory", "1025Mi is more than the limit, 1Gi"),
        ({"memory": "1G"}, {"memory": "1Gi"}, None, None),
        ({"cpu": "1"}, {}, None, None),
        ({}, {"nvidia.com/gpu": 8}, None, None),
        ({"nvidia.com/gpu": "8"}, {"nvidia.com/gpu": 8}, None, None),
        ({"nvidia.com/gpu": 7}, {"nvidia.com/gpu": 8}, "requests.nvidia.com/gpu", "cannot be overcommitted"),
        ({"nvidia.com/gpu": 8}, {}, "requests.nvidia.com/gpu", "cannot be overcommitted"),
        ({}, {"nvidia.com/gpu": "0.5"}, "limits.nvidia.com/gpu", "not a whole number"),
        ({}, {"nvidia.com/gpu": "500m"}, "limits.nvidia.com/gpu", "not a whole number"),
        ({"cpu": "0.0005"}, {}, "requests.cpu", "finer than 1m"),
        ({"cpu": "-1"}, {}, "requests.cpu", "negative"),
        ({"memory": "16GB"}, {}, "requests.memory", "'16GB' is not a quantity"),
        ({}, {"ephemeral-storage": "1 Gi"}, "limits.ephemeral-storage", "not a quantity"),
    ],
)
def test_requests_and_limits(requests: Document, limits: Document, path: str | None, message: str | None) -> None:
    problems = found({"resources": {"requests": requests, "limits": limits}})
    assert [where for where, _ in problems] == ([f"containers[0].resources.{path}"] if path else [])
    assert message is None or message in problems[0][1]


PORTS = [{"name": "http", "containerPort": 80}]


@pytest.mark.parametrize(
    ("container", "path", "message"),
    [
        ({"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "env", "A occurs twice"),
        ({"env": [{"name": "A=B", "value": "1"}]}, "env[0].name", "not a variable's name"),
        ({"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {}}}]}, "env[0]", "both value and valueFrom"),
        ({"env": [{"name": "A", "valueFrom": {}}]}, "env[0].valueFrom", "exactly one source"),
        ({"env": [{"name": "A", "valueFrom": {"fieldRef": {}, "secretKeyRef": {}}}]}, "env[0].valueFrom", "exactly one source"),
        ({"env": [{"name": "A.b-c", "value": ""}]}, None, ""),
        ({"ports": [*PORTS, {"containerPort": 80}]}, "ports", "(80, 'TCP') occurs twice"),
        ({"ports": [*PORTS, {"containerPort": 80, "protocol": "UDP"}]}, None, ""),
        ({"ports": [{"containerPort": 0}]}, "ports[0].containerPort", "not between 1 and 65535"),
        ({"ports": [{"containerPort": 65536}]}, "ports[0].containerPort", "not between 1 and 65535"),
        ({"ports": [{"containerPort": 65535}]}, None, ""),
        ({"ports": [{"containerPort": 1, "name": "a" * 15}]}, None, ""),
        ({"ports": [{"containerPort": 1, "name": "a" * 16}]}, "ports[0].name", "not a port's name"),
        ({"ports": [{"containerPort": 1, "name": "80"}]}, "ports[0].name", "not a port's name"),
        ({"ports": [{"containerPort": 1, "name": "a--b"}]}, "ports[0].name", "not a port's name"),
        ({"ports": PORTS, "readinessProbe": {"tcpSocket": {"port": "http"}}}, None, ""),
        (
            {"ports": PORTS, "readinessProbe": {"tcpSocket": {"port": "htp"}}},
            "readinessProbe.tcpSocket.port",
            "no port named htp",
        ),
        ({"livenessProbe": {"periodSeconds": 1}}, "livenessProbe", "needs exactly one of"),
        ({"livenessProbe": {"exec": {"command": ["a"]}, "httpGet": {"port": 1}}}, "livenessProbe", "needs exactly one of"),
        ({"name": "Main"}, "name", "not a DNS label"),
        ({"name": "a" * 64}, "name", "not a DNS label"),
        ({"image": "strata:1 "}, "image", "spaces"),
    ],
)
def test_containers(container: Document, path: str | None, message: str) -> None:
    problems = found(container)
    assert [where for where, _ in problems] == ([f"containers[0].{path}"] if path else [])
    assert path is None or message in problems[0][1]


def test_mount_paths_are_distinct() -> None:
    mounts = [{"name": "v", "mountPath": "/a"}, {"name": "w", "mountPath": "/a"}]
    volumes = [{"name": "v", "emptyDir": {}}, {"name": "w", "emptyDir": {}}]
    assert found({"volumeMounts": mounts}, volumes=volumes) == [("containers[0].volumeMounts", "/a occurs twice")]


@pytest.mark.parametrize(
    ("volumes", "path", "message"),
    [
        ([{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}], None, ""),
        ([{"name": "v", "emptyDir": {"sizeLimit": "1GB"}}], "volumes[0].emptyDir.sizeLimit", "not a quantity"),
        ([{"name": "v", "emptyDir": {}, "configMap": {"name": "m"}}], "volumes[0]", "more than one source"),
        ([{"name": "v", "emptyDir": {}}, {"name": "v", "nfs": {}}], "volumes", "v occurs twice"),
        ([{"name": "a.b", "emptyDir": {}}], "volumes[0].name", "not a DNS label"),
    ],
)
def test_volumes(volumes: list[Document], path: str | None, message: str) -> None:
    problems = found(volumes=volumes)
    assert [where for where, _ in problems] == ([path] if path else [])
    assert path is None or message in problems[0][1]


def test_names_in_a_pod_are_distinct() -> None:
    second = {"name": "c", "image": "strata:1"}
    assert found(initContainers=[second]) == [("containers", "c occurs twice")]
    ports = {"ports": PORTS}
    assert found(ports, initContainers=[{**second, "name": "d", **ports}]) == []
    both = {"kind": "Deployment", "metadata": {"name": "d"}, "spec": {"template": template(ports)}}
    both["spec"]["template"]["spec"]["containers"].append(
        {**second, "name": "d", "ports": [{"name": "http", "containerPort": 81}]}
    )
    assert [finding.message for finding in pods.findings(both)] == ["the port name http occurs twice"]


def test_storage_of_claims() -> None:
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "c"}, "spec": {"resources": {"requests": {"storage": "1TB"}}}}
    [finding] = pods.findings(claim)
    assert (finding.path, finding.message) == ("spec.resources.requests.storage", "'1TB' is not a quantity")
    volume = {"kind": "PersistentVolume", "metadata": {"name": "v"}, "spec": {"capacity": {"storage": "1TB"}}}
    assert [finding.path for finding in pods.findings(volume)] == ["spec.capacity.storage"]
    claims = {"template": template(), "volumeClaimTemplates": [{"metadata": {"name": "w"}, "spec": claim["spec"]}]}
    stateful = {"kind": "StatefulSet", "metadata": {"name": "s"}, "spec": claims}
    assert [finding.path for finding in pods.findings(stateful)] == [
        "spec.volumeClaimTemplates[0].spec.resources.requests.storage"
    ]


def test_grace_periods() -> None:
    assert found(terminationGracePeriodSeconds=0) == []
    assert found(terminationGracePeriodSeconds=-1) == [("terminationGracePeriodSeconds", "-1 is negative")]


@pytest.mark.parametrize(
    ("pod", "path"),
    [
        ({"restartPolicy": "Never"}, None),
        ({"restartPolicy": "Sometimes"}, "restartPolicy"),
        ({"dnsPolicy": "None"}, None),
        ({"containers": [{"name": "c", "imagePullPolicy": "Allways"}]}, "containers[0].imagePullPolicy"),
        ({"containers": [{"name": "c", "ports": [{"protocol": "tcp"}]}]}, "containers[0].ports[0].protocol"),
        ({"tolerations": [{"operator": "Exists", "effect": "NoSchedule"}, {"key": "a"}]}, None),
        ({"tolerations": [{"operator": "Exist"}]}, "tolerations[0].operator"),
        ({"tolerations": [{"operator": "In"}]}, "tolerations[0].operator"),
        ({"tolerations": [{"operator": "Exists", "effect": "NoScheduling"}]}, "tolerations[0].effect"),
        ({"securityContext": {"seccompProfile": {"type": "Default"}}}, "securityContext.seccompProfile.type"),
        ({"volumes": [{"name": "v", "emptyDir": {"medium": "memory"}}]}, "volumes[0].emptyDir.medium"),
        ({"affinity": {"nodeAffinity": {"x": [{"matchExpressions": [{"operator": "In"}]}]}}}, None),
    ],
)
def test_choices_of_pods(pod: Document, path: str | None) -> None:
    workload = {"kind": "Deployment", "metadata": {"name": "d"}, "spec": {"template": {"spec": pod}}}
    assert [finding.path for finding in choices.findings(workload)] == ([f"spec.template.spec.{path}"] if path else [])
    ray = {"kind": "RayCluster", "metadata": {"name": "r"}, "spec": {"headGroupSpec": {"template": {"spec": pod}}}}
    assert [finding.path for finding in choices.findings(ray)] == ([f"spec.headGroupSpec.template.spec.{path}"] if path else [])


def test_choices_of_objects() -> None:
    def wrong_choices(kind: str, **spec: Any) -> list[str]:
        return [finding.path for finding in choices.findings({"kind": kind, "metadata": {"name": "a"}, "spec": spec})]

    assert wrong_choices("NetworkPolicy", policyTypes=["Ingress", "Egress"]) == []
    assert wrong_choices("NetworkPolicy", policyTypes=["Ingress", "In"]) == ["spec.policyTypes"]
    assert wrong_choices("PersistentVolumeClaim", accessModes=["ReadWriteAll"]) == ["spec.accessModes"]
    assert wrong_choices("StatefulSet", updateStrategy={"type": "Recreate"}) == ["spec.updateStrategy.type"]
    assert wrong_choices("Other", accessModes=["ReadWriteAll"]) == [], "the field may mean something else there"


# Names, labels and annotations


def named(kind: str = "ConfigMap", name: str = "a", **metadata: Any) -> Document:
    return {"kind": kind, "metadata": {"name": name, **metadata}}


def wrong(document: Document) -> list[str]:
    if document["kind"] == "CronJob":
        document = {**document, "spec": {"jobTemplate": {"spec": {"template": template()}}}}
    return [finding.path for finding in syntax.findings(document)]


@pytest.mark.parametrize(
    ("kind", "name", "valid"),
    [
        ("ConfigMap", "a.b-c", True),
        ("ConfigMap", "a" * 253, True),
        ("ConfigMap", "a" * 254, False),
        ("ConfigMap", "A", False),
        ("ConfigMap", "a_b", False),
        ("ConfigMap", "-a", False),
        ("ConfigMap", "a..b", False),
        ("Namespace", "a" * 63, True),
        ("Namespace", "a" * 64, False),
        ("Namespace", "a.b", False),
        ("Service", "a" * 64, False),
        ("CronJob", "a" * 52, True),
        ("CronJob", "a" * 53, False),
        ("ClusterRole", "system:node", True),
        ("ClusterRole", "a/b", False),
        ("ClusterQueue", "team_a", False),
    ],
)
def test_names(kind: str, name: str, valid: bool) -> None:
    assert wrong(named(kind, name)) == ([] if valid else ["metadata.name"])


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("a", "b", True),
        ("a", "", True),
        ("a", "b" * 63, True),
        ("a", "b" * 64, False),
        ("a", "b c", False),
        ("a", "b/c", False),
        ("a", "-b", False),
        ("example.com/a", "b", True),
        ("Example.com/a", "b", False),
        ("a" * 63, "b", True),
        ("a" * 64, "b", False),
        ("/a", "b", False),
        ("a/b/c", "b", False),
    ],
)
def test_labels_and_selectors(key: str, value: str, valid: bool) -> None:
    labels = {key: value}
    assert wrong(named(labels=labels)) == ([] if valid else [f"metadata.labels.{key}"])
    policy = {**named("NetworkPolicy"), "spec": {"podSelector": {"matchLabels": labels}}}
    assert wrong(policy) == ([] if valid else [f"spec.podSelector.matchLabels.{key}"])
    workload = {**named("Deployment"), "spec": {"template": {"metadata": {"labels": labels}, "spec": {"nodeSelector": labels}}}}
    paths = ["spec.template.metadata.labels", "spec.template.spec.nodeSelector"]
    assert wrong(workload) == ([] if valid else [f"{path}.{key}" for path in paths])


@pytest.mark.parametrize(
    ("expression", "path"),
    [
        ({"key": "a", "operator": "In", "values": ["b"]}, None),
        ({"key": "a", "operator": "In", "values": []}, "values"),
        ({"key": "a", "operator": "Exists"}, None),
        ({"key": "a", "operator": "Exists", "values": ["b"]}, "values"),
        ({"key": "a", "operator": "Equals", "values": ["b"]}, "operator"),
    ],
)
def test_expressions_of_selectors(expression: Document, path: str | None) -> None:
    budget = {**named("PodDisruptionBudget"), "spec": {"selector": {"matchExpressions": [expression]}}}
    assert wrong(budget) == ([f"spec.selector.matchExpressions[0].{path}"] if path else [])


def test_annotations() -> None:
    assert wrong(named(annotations={"example.com/A": "any text: {}"})) == []
    assert wrong(named(annotations={"a b": "x"})) == ["metadata.annotations.a b"]
    assert wrong(named(annotations={"a": "x" * (256 * 1024 - 1)})) == []
    assert wrong(named(annotations={"a": "x" * 256 * 1024})) == ["metadata.annotations"]


def test_data_of_config_maps() -> None:
    assert wrong({**named(), "data": {"a_B-1.yaml": "x"}}) == []
    assert wrong({**named(), "data": {"a/b": "x"}}) == ["data.a/b"]
    assert wrong({**named(), "data": {"a": "ä" * (512 * 1024)}}) == []
    assert wrong({**named(), "data": {"a": "ä" * (512 * 1024) + "x"}}) == ["data"]
    assert wrong(named(namespace="a.b")) == ["metadata.namespace"]
