"""Rules of KubeRay's operator, each with an object that is valid except for the changed fields."""

import json
from typing import Any

import pytest

from strata.deploy.kuberay.rules import findings

POD = {"spec": {"containers": [{"name": "ray", "image": "strata:1"}]}}
HEAD: dict[str, Any] = {"rayStartParams": {}, "template": POD}
WORKERS = {"groupName": "workers", "minReplicas": 1, "replicas": 1, "maxReplicas": 2, "template": POD}
CLUSTER: dict[str, Any] = {"rayVersion": "2.60.0", "headGroupSpec": HEAD, "workerGroupSpecs": [WORKERS]}
SCALED = {"enableInTreeAutoscaling": True, "autoscalerOptions": {"version": "v2"}}
STEPS = {"gatewayClassName": "istio", "stepSizePercent": 10, "maxSurgePercent": 20, "intervalSeconds": 10}
INCREMENTAL = {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": STEPS}

# Maps a path to its new value: keys separated by dots, list indices as numbers.
Changes = dict[str, Any]


def changed(spec: dict[str, Any], changes: Changes) -> dict[str, Any]:
    spec = json.loads(json.dumps(spec))  # deep copy
    for path, value in changes.items():
        *parents, last = path.split(".")
        node: Any = spec
        for parent in parents:
            node = node[int(parent)] if isinstance(node, list) else node.setdefault(parent, {})
        node[last] = value
    return spec


def found(kind: str, spec: dict[str, Any], **metadata: Any) -> list[tuple[str, str]]:
    document = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": "strata", **metadata}, "spec": spec}
    return [(finding.path, finding.message) for finding in findings(document)]


def env(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "value": "true"} for name in names]


HEAD_ENV = "headGroupSpec.template.spec.containers.0.env"


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        ({"headGroupSpec.template.spec.containers": []}, "headGroupSpec.template.spec.containers", "must not be empty"),
        (
            {"workerGroupSpecs.0.template.spec.containers": []},
            "workerGroupSpecs[0].template.spec.containers",
            "must not be empty",
        ),
        ({"workerGroupSpecs.0.minReplicas": 3}, "workerGroupSpecs[0].minReplicas", "more than maxReplicas, 2"),
        ({"workerGroupSpecs.0.minReplicas": -1}, "workerGroupSpecs[0].minReplicas", "negative"),
        ({"workerGroupSpecs.0.maxReplicas": -1}, "workerGroupSpecs[0].maxReplicas", "negative"),
        ({"workerGroupSpecs.0.maxReplicas": None}, "workerGroupSpecs[0].minReplicas", "without the autoscaler"),
        ({"workerGroupSpecs.0.replicas": 5}, "workerGroupSpecs[0].replicas", "not between"),
        (
            {"headGroupSpec.resources": {"cpu": "1"}, "headGroupSpec.rayStartParams": {"num-cpus": "0"}},
            "headGroupSpec.resources",
            "together with rayStartParams.num-cpus",
        ),
        (
            {"workerGroupSpecs.0.resources": {"cpu": "1"}, "workerGroupSpecs.0.rayStartParams": {"resources": '"{}"'}},
            "workerGroupSpecs[0].resources",
            "together with rayStartParams.resources",
        ),
        ({"headGroupSpec.rayStartParams": {"labels": "a=b"}}, "headGroupSpec.rayStartParams.labels", "not supported"),
        ({"workerGroupSpecs.0.labels": {"zone": "not a value"}}, "workerGroupSpecs[0].labels", "is not a valid label"),
        ({"workerGroupSpecs.0.idleTimeoutSeconds": 60}, "workerGroupSpecs[0].idleTimeoutSeconds", "v2"),
        ({"workerGroupSpecs.0.idleTimeoutSeconds": -1, **SCALED}, "workerGroupSpecs[0].idleTimeoutSeconds", "negative"),
        ({"workerGroupSpecs.0.priority": 1}, "workerGroupSpecs[0].priority", "v2"),
        ({"workerGroupSpecs.0.priority": 1, "rayVersion": "2.55.1", **SCALED}, "workerGroupSpecs[0].priority", "2.56.0"),
        ({"workerGroupSpecs.0.suspend": True, **SCALED}, "workerGroupSpecs[0].suspend", "autoscaler"),
        ({HEAD_ENV: env("RAY_REDIS_ADDRESS")}, "headGroupSpec.template.spec.containers[0].env", "gcsFaultToleranceOptions"),
        (
            {HEAD_ENV: env("RAY_REDIS_ADDRESS"), "gcsFaultToleranceOptions": {"redisAddress": "redis:6379"}},
            "headGroupSpec.template.spec.containers[0].env",
            "redisAddress",
        ),
        (
            {HEAD_ENV: env("REDIS_PASSWORD"), "gcsFaultToleranceOptions": {"redisAddress": "redis:6379"}},
            "headGroupSpec.template.spec.containers[0].env",
            "redisPassword",
        ),
        ({HEAD_ENV: env("REDIS_USERNAME")}, "headGroupSpec.template.spec.containers[0].env", "redisUsername"),
        (
            {"headGroupSpec.rayStartParams": {"redis-password": "x"}, "gcsFaultToleranceOptions": {"redisAddress": "redis:6379"}},
            "headGroupSpec.rayStartParams.redis-password",
            "redisPassword",
        ),
        ({"gcsFaultToleranceOptions": {"backend": "rocksdb"}}, "gcsFaultToleranceOptions.backend", "off by default"),
        ({"gcsFaultToleranceOptions": {"storage": {}}}, "gcsFaultToleranceOptions.storage", "rocksdb"),
        ({HEAD_ENV: env("RAY_enable_autoscaler_v2")}, "headGroupSpec.template.spec.containers[0].env", "enableInTreeAutoscaling"),
        ({HEAD_ENV: env("RAY_enable_autoscaler_v2"), **SCALED}, "headGroupSpec.template.spec.containers[0].env", "together"),
        (
            {"headGroupSpec.template.spec.restartPolicy": "Always", **SCALED},
            "headGroupSpec.template.spec.restartPolicy",
            "Never or unset",
        ),
        (
            {"workerGroupSpecs.0.template.spec.restartPolicy": "OnFailure", **SCALED},
            "workerGroupSpecs[0].template.spec.restartPolicy",
            "Never or unset",
        ),
        ({"autoscalerOptions": {"idleTimeoutSeconds": -1}}, "autoscalerOptions.idleTimeoutSeconds", "negative"),
        ({"autoscalerOptions": {"env": env("KUBERAY_GEN_AUTOSCALER_START_CMD")}}, "autoscalerOptions.env", "set by the operator"),
        ({"authOptions": {"mode": "token"}, "rayVersion": "2.51.0"}, "rayVersion", "2.52.0"),
        ({"authOptions": {"mode": "token"}, "rayVersion": ""}, "rayVersion", "2.52.0"),
        ({"authOptions": {"enableK8sTokenAuth": True}}, "authOptions.enableK8sTokenAuth", "mode: token"),
        ({"authOptions": {"mode": "token", "enableK8sTokenAuth": True}, "rayVersion": "2.54.0"}, "rayVersion", "2.55.0"),
        (
            {"authOptions": {"mode": "token", "enableK8sTokenAuth": True, "secretName": "x"}},
            "authOptions.secretName",
            "together with enableK8sTokenAuth",
        ),
        ({"networkPolicy": {}}, "networkPolicy", "RayClusterNetworkPolicy, which is off"),
        ({"tlsOptions": {"enabled": False}}, "tlsOptions", "RayClusterMTLS, which is off"),
        ({"historyServerOptions": {}}, "historyServerOptions", "RayClusterHistoryServer, which is off"),
        ({"upgradeStrategy": {"type": "NewCluster"}}, "upgradeStrategy.type", "Recreate or None"),
    ],
)
def test_invalid_clusters(changes: Changes, path: str, expected: str) -> None:
    [(where, message)] = found("RayCluster", changed(CLUSTER, changes))
    assert where == f"spec.{path}"
    assert expected in message


@pytest.mark.parametrize(
    "annotations", [{"ray.io/ft-enabled": "true"}, {"ray.io/external-storage-namespace": "mine"}], ids=lambda a: next(iter(a))
)
def test_fault_tolerance_options_and_annotation(annotations: dict[str, str]) -> None:
    spec = changed(CLUSTER, {"gcsFaultToleranceOptions": {"redisAddress": "redis:6379"}})
    [(where, message)] = found("RayCluster", spec, annotations=annotations)
    assert where == "spec.gcsFaultToleranceOptions"
    assert "together with the annotation" in message


@pytest.mark.parametrize(("kind", "longest"), [("RayCluster", 53), ("RayJob", 47), ("RayService", 47)])
def test_name_limits(kind: str, longest: int) -> None:
    spec: dict[str, Any] = {
        "RayCluster": CLUSTER,
        "RayJob": {"rayClusterSpec": CLUSTER},
        "RayService": {"rayClusterConfig": CLUSTER},
    }[kind]
    assert found(kind, spec, name="a" * longest) == []
    [(where, message)] = found(kind, spec, name="a" * (longest + 1))
    assert where == "metadata.name"
    assert f"may have {longest}" in message
    for name in ("Strata", "9lives", "a.b", "a-", ""):
        assert "DNS-1035" in found(kind, spec, name=name)[0][1]


def test_valid_objects() -> None:
    assert found("RayCluster", CLUSTER) == []
    assert found("RayCluster", changed(CLUSTER, {"workerGroupSpecs.0.idleTimeoutSeconds": 60, **SCALED})) == []
    assert found("RayCluster", changed(CLUSTER, {"authOptions": {"mode": "token"}})) == []
    assert found("RayCluster", changed(CLUSTER, {"gcsFaultToleranceOptions": {"redisAddress": "redis:6379"}})) == []
    assert found("RayJob", {"rayClusterSpec": CLUSTER, "backoffLimit": 3, "submissionMode": "K8sJobMode"}) == []
    assert found("RayService", {"rayClusterConfig": {**CLUSTER, **SCALED}, "upgradeStrategy": INCREMENTAL}) == []


def rule(policy: str, ttl: int = 0, **condition: str) -> dict[str, Any]:
    return {"policy": policy, "condition": {"ttlSeconds": ttl, **(condition or {"jobStatus": "SUCCEEDED"})}}


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        ({"suspend": True}, "suspend", "shutdownAfterJobFinishes"),
        ({"ttlSecondsAfterFinished": 60}, "ttlSecondsAfterFinished", "shutdownAfterJobFinishes"),
        ({"ttlSecondsAfterFinished": -1}, "ttlSecondsAfterFinished", "negative"),
        ({"activeDeadlineSeconds": 0}, "activeDeadlineSeconds", "positive"),
        ({"preRunningDeadlineSeconds": -5}, "preRunningDeadlineSeconds", "positive"),
        ({"backoffLimit": -1}, "backoffLimit", "negative"),
        ({"backoffLimit": 1, "submissionMode": "InteractiveMode"}, "backoffLimit", "InteractiveMode"),
        ({"backoffLimit": 1, "clusterSelector": {"ray.io/cluster": "lab"}}, "backoffLimit", "clusterSelector"),
        ({"clusterSelector": {"name": "lab"}}, "clusterSelector", "ray.io/cluster"),
        (
            {"suspend": True, "shutdownAfterJobFinishes": True, "clusterSelector": {"ray.io/cluster": "lab"}},
            "suspend",
            "clusterSelector",
        ),
        ({"rayClusterSpec": None}, "rayClusterSpec", "must be set"),
        ({"submissionMode": "SidecarMode", "submitterPodTemplate": {"spec": {}}}, "submitterPodTemplate", "SidecarMode"),
        ({"submissionMode": "SidecarMode", "submitterConfig": {"backoffLimit": 1}}, "submitterConfig", "SidecarMode"),
        (
            {"submissionMode": "SidecarMode", "rayClusterSpec.headGroupSpec.template.spec.restartPolicy": "Always"},
            "rayClusterSpec.headGroupSpec.template.spec.restartPolicy",
            "SidecarMode",
        ),
        ({"runtimeEnvYAML": "a: ["}, "runtimeEnvYAML", "not valid YAML"),
        (
            {"rayClusterSpec.authOptions": {"mode": "token", "enableK8sTokenAuth": True}},
            "rayClusterSpec.authOptions.enableK8sTokenAuth",
            "RayJob",
        ),
        ({"rayClusterSpec.workerGroupSpecs.0.minReplicas": 9}, "rayClusterSpec.workerGroupSpecs[0].minReplicas", "more than"),
        ({"deletionStrategy": {}}, "deletionStrategy", "needs both"),
        ({"deletionStrategy": {"onSuccess": {"policy": "DeleteSelf"}}}, "deletionStrategy", "needs both"),
        (
            {"deletionStrategy": {"onSuccess": {"policy": "DeleteSelf"}, "onFailure": {}}},
            "deletionStrategy.onFailure.policy",
            "must be set",
        ),
        (
            {
                "shutdownAfterJobFinishes": True,
                "deletionStrategy": {"onSuccess": {"policy": "DeleteNone"}, "onFailure": {"policy": "DeleteSelf"}},
            },
            "deletionStrategy.onSuccess.policy",
            "contradicts",
        ),
        (
            {"shutdownAfterJobFinishes": True, "deletionStrategy": {"deletionRules": [rule("DeleteSelf")]}},
            "deletionStrategy.deletionRules",
            "shutdownAfterJobFinishes",
        ),
        (
            {"deletionStrategy": {"deletionRules": [rule("DeleteSelf")], "onSuccess": {"policy": "DeleteSelf"}}},
            "deletionStrategy.deletionRules",
            "onSuccess",
        ),
        (
            {"deletionStrategy": {"deletionRules": [rule("DeleteSelf"), rule("DeleteSelf", 5)]}},
            "deletionStrategy.deletionRules[1]",
            "twice",
        ),
        (
            {"deletionStrategy": {"deletionRules": [rule("DeleteSelf", 5), rule("DeleteCluster", 10)]}},
            "deletionStrategy.deletionRules",
            "would come before DeleteCluster",
        ),
        (
            {"deletionStrategy": {"deletionRules": [rule("DeleteSelf", jobStatus="FAILED", jobDeploymentStatus="Failed")]}},
            "deletionStrategy.deletionRules[0].condition",
            "one of",
        ),
        (
            {"deletionStrategy": {"deletionRules": [rule("DeleteSelf", -1)]}},
            "deletionStrategy.deletionRules[0].condition.ttlSeconds",
            "negative",
        ),
        (
            {
                "rayClusterSpec.enableInTreeAutoscaling": True,
                "deletionStrategy": {"deletionRules": [rule("DeleteWorkers")]},
            },
            "deletionStrategy.deletionRules[0].policy",
            "autoscaler",
        ),
    ],
)
def test_invalid_jobs(changes: Changes, path: str, expected: str) -> None:
    [(where, message)] = found("RayJob", changed({"rayClusterSpec": CLUSTER}, changes))
    assert where == f"spec.{path}"
    assert expected in message


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        ({"upgradeStrategy.type": "Recreate"}, "upgradeStrategy.type", "must be NewCluster"),
        ({"upgradeStrategy.clusterUpgradeOptions": None}, "upgradeStrategy.clusterUpgradeOptions", "must be set"),
        (
            {"upgradeStrategy.clusterUpgradeOptions.stepSizePercent": 30},
            "upgradeStrategy.clusterUpgradeOptions.stepSizePercent",
            "more than maxSurgePercent, 20",
        ),
        (
            {"upgradeStrategy.clusterUpgradeOptions.stepSizePercent": None},
            "upgradeStrategy.clusterUpgradeOptions.stepSizePercent",
            "between 0 and 100",
        ),
        (
            {"upgradeStrategy.clusterUpgradeOptions.maxSurgePercent": 101},
            "upgradeStrategy.clusterUpgradeOptions.maxSurgePercent",
            "between 0 and 100",
        ),
        (
            {"upgradeStrategy.clusterUpgradeOptions.intervalSeconds": 0},
            "upgradeStrategy.clusterUpgradeOptions.intervalSeconds",
            "positive",
        ),
        (
            {"upgradeStrategy.clusterUpgradeOptions.gatewayClassName": ""},
            "upgradeStrategy.clusterUpgradeOptions.gatewayClassName",
            "must be set",
        ),
        ({"rayClusterConfig.enableInTreeAutoscaling": False}, "rayClusterConfig.enableInTreeAutoscaling", "must be true"),
        ({"rayClusterDeletionDelaySeconds": -1}, "rayClusterDeletionDelaySeconds", "negative"),
        (
            {"rayClusterConfig.headGroupSpec.headService": {"metadata": {"name": "mine"}}},
            "rayClusterConfig.headGroupSpec.headService.metadata.name",
            "must not be set",
        ),
        (
            {"rayClusterConfig.authOptions": {"mode": "token", "enableK8sTokenAuth": True}},
            "rayClusterConfig.authOptions.enableK8sTokenAuth",
            "RayService",
        ),
    ],
)
def test_invalid_services(changes: Changes, path: str, expected: str) -> None:
    valid = {"rayClusterConfig": {**CLUSTER, **SCALED}, "upgradeStrategy": INCREMENTAL}
    [(where, message)] = found("RayService", changed(valid, changes))
    assert where == f"spec.{path}"
    assert expected in message


@pytest.mark.parametrize(
    ("timeout", "valid"), [("30m", True), ("1h30m", True), ("1800", True), ("0", False), ("soon", False), ("0s", False)]
)
def test_initializing_timeout(timeout: str, valid: bool) -> None:
    annotations = {"ray.io/initializing-timeout": timeout}
    assert bool(found("RayService", {"rayClusterConfig": CLUSTER}, annotations=annotations)) is not valid
