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


BACKEND, BUCKET = {"name": "STORAGE_BACKEND", "value": "GCS"}, {"name": "GCS_BUCKET", "value": "bucket"}
COLLECTOR = {"image": "collector:1", "env": [BACKEND, BUCKET]}


def with_gates(spec: dict[str, Any]) -> list[tuple[str, str]]:
    labels = {f"strata.dev/gate-{gate}": "true" for gate in ("RayClusterMTLS", "RayClusterHistoryServer")}
    return found("RayCluster", spec, labels=labels)


def test_a_label_enables_a_gate() -> None:
    both = {"tlsOptions": {"enabled": True}, "historyServerOptions": {"collectorOptions": COLLECTOR}}
    assert with_gates(changed(CLUSTER, both)) == []
    [(where, message)] = with_gates(changed(CLUSTER, {**both, "networkPolicy": {}}))
    assert where == "spec.networkPolicy" and "off by default" in message


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        (
            {"tlsOptions": {"enabled": True}, HEAD_ENV: env("RAY_USE_TLS")},
            "headGroupSpec.template.spec.containers[0].env",
            "RAY_USE_TLS is set by the operator",
        ),
        ({"historyServerOptions": {}}, "historyServerOptions.collectorOptions", "must be set"),
        (
            {"historyServerOptions": {"collectorOptions": COLLECTOR | {"image": ""}}},
            "historyServerOptions.collectorOptions.image",
            "must be set",
        ),
        (
            {"historyServerOptions": {"collectorOptions": COLLECTOR | {"env": [BUCKET]}}},
            "historyServerOptions.collectorOptions.env",
            "STORAGE_BACKEND must have a literal value",
        ),
        (
            {"historyServerOptions": {"collectorOptions": COLLECTOR | {"env": [BACKEND]}}},
            "historyServerOptions.collectorOptions.env",
            "needs GCS_BUCKET",
        ),
        (
            {"historyServerOptions": {"collectorOptions": COLLECTOR | {"env": [BACKEND, BUCKET, *env("RAY_ROLE")]}}},
            "historyServerOptions.collectorOptions.env",
            "RAY_ROLE is set by the operator",
        ),
    ],
)
def test_invalid_clusters_behind_gates(changes: Changes, path: str, expected: str) -> None:
    [(where, message)] = with_gates(changed(CLUSTER, changes))
    assert where == f"spec.{path}" and expected in message
    if "tlsOptions" in changes:
        assert with_gates(changed(CLUSTER, {**changes, "tlsOptions": {"enabled": False}})) == []


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
        ({"runtimeEnvYAML": "a: 1\na: 2"}, "runtimeEnvYAML", "the key 'a' occurs twice"),
        ({"runtimeEnvYAML": "text"}, "runtimeEnvYAML", "is not a mapping"),
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


# Both sides of each limit

ZERO_OR_MORE = [("workerGroupSpecs.0.idleTimeoutSeconds", {**SCALED}), ("autoscalerOptions.idleTimeoutSeconds", {})]


@pytest.mark.parametrize(("path", "beside"), ZERO_OR_MORE)
def test_idle_timeouts_may_be_zero(path: str, beside: Changes) -> None:
    assert found("RayCluster", changed(CLUSTER, {**beside, path: 0})) == []
    assert len(found("RayCluster", changed(CLUSTER, {**beside, path: -1}))) == 1


@pytest.mark.parametrize(
    ("least", "replicas", "most", "path"),
    [
        (0, 0, 0, None),
        (2, 2, 2, None),
        (1, None, 1, None),
        (0, 3, 2, "replicas"),
        (2, 1, 2, "replicas"),
        (3, 3, 2, "minReplicas"),
        (-1, 1, 2, "minReplicas"),
        (0, 0, -1, "maxReplicas"),
        (None, 1, 2, "minReplicas"),
        (1, 1, None, "minReplicas"),
    ],
)
def test_bounds_of_replicas(least: int | None, replicas: int | None, most: int | None, path: str | None) -> None:
    bounds = {"minReplicas": least, "replicas": replicas, "maxReplicas": most}
    problems = found("RayCluster", changed(CLUSTER, {f"workerGroupSpecs.0.{key}": value for key, value in bounds.items()}))
    assert [where for where, _ in problems] == ([f"spec.workerGroupSpecs[0].{path}"] if path else [])


@pytest.mark.parametrize(
    ("least", "replicas", "most", "valid"),
    [(None, 0, None, True), (None, 7, None, True), (None, 3, 2, False), (1, 0, None, False)],
)
def test_with_the_autoscaler_unset_bounds_are_zero_and_infinity(
    least: int | None, replicas: int, most: int | None, valid: bool
) -> None:
    bounds = {"minReplicas": least, "replicas": replicas, "maxReplicas": most}
    changes = {f"workerGroupSpecs.0.{key}": value for key, value in bounds.items()}
    assert (found("RayCluster", changed(CLUSTER, {**SCALED, **changes})) == []) is valid


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("zone", "a", True),
        ("zone", "", True),
        ("zone", "a" * 63, True),
        ("zone", "a" * 64, False),
        ("zone", "a_b.c-D", True),
        ("zone", "-a", False),
        ("zone", "a-", False),
        ("a" * 63, "a", True),
        ("a" * 64, "a", False),
        ("p" * 253 + "/zone", "a", True),
        ("p" * 254 + "/zone", "a", False),
        ("UPPER/zone", "a", False),
        ("", "a", False),
    ],
)
def test_labels_of_groups(key: str, value: str, valid: bool) -> None:
    spec = changed(CLUSTER, {})
    spec["headGroupSpec"]["labels"] = {key: value}
    assert (found("RayCluster", spec) == []) is valid


@pytest.mark.parametrize(
    ("changes", "oldest", "too_old"),
    [
        ({"authOptions": {"mode": "token"}}, "2.52.0", "2.51.9"),
        ({"authOptions": {"mode": "token", "enableK8sTokenAuth": True}}, "2.55.0", "2.54.9"),
        ({"workerGroupSpecs.0.priority": 1, **SCALED}, "2.56.0", "2.55.9"),
    ],
)
def test_the_oldest_version_of_ray(changes: Changes, oldest: str, too_old: str) -> None:
    assert found("RayCluster", changed(CLUSTER, {**changes, "rayVersion": oldest})) == []
    assert found("RayCluster", changed(CLUSTER, {**changes, "rayVersion": f"v{oldest}"})) == []
    assert found("RayCluster", changed(CLUSTER, {**changes, "rayVersion": oldest.removesuffix(".0")})) == []
    assert len(found("RayCluster", changed(CLUSTER, {**changes, "rayVersion": too_old}))) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"workerGroupSpecs.0.priority": 0},
        {"workerGroupSpecs.0.suspend": True},
        {"workerGroupSpecs.0.resources": {"cpu": "1"}},
        {"headGroupSpec.rayStartParams": {"num-cpus": "0"}},
        {HEAD_ENV: [{"name": "RAY_enable_autoscaler_v2", "value": "0"}]},
        {HEAD_ENV: env("RAY_enable_autoscaler_v2"), "enableInTreeAutoscaling": True},
        {HEAD_ENV: env("RAY_enable_autoscaler_v2"), "enableInTreeAutoscaling": True, "workerGroupSpecs.0.idleTimeoutSeconds": 6},
        {"headGroupSpec.template.spec.restartPolicy": "Always"},
        {"headGroupSpec.template.spec.restartPolicy": "Always", "enableInTreeAutoscaling": True},
        {"headGroupSpec.template.spec.restartPolicy": "Never", **SCALED},
        {"autoscalerOptions": {"env": env("OTHER")}},
        {"authOptions": {"mode": "disabled"}, "rayVersion": "2.0.0"},
        {"authOptions": {"mode": "token", "secretName": "x"}},
        {"gcsFaultToleranceOptions": {"backend": "redis"}},
        {"upgradeStrategy": {"type": "Recreate"}},
        {"upgradeStrategy": {"type": "None"}},
    ],
)
def test_valid_clusters(changes: Changes) -> None:
    assert found("RayCluster", changed(CLUSTER, changes)) == []


@pytest.mark.parametrize(("annotation", "valid"), [("true", True), ("TRUE", True), ("false", False), (None, False)])
def test_a_redis_address_in_the_environment_needs_the_annotation(annotation: str | None, valid: bool) -> None:
    annotations = {"ray.io/ft-enabled": annotation} if annotation else {}
    spec = changed(CLUSTER, {HEAD_ENV: env("RAY_REDIS_ADDRESS")})
    assert (found("RayCluster", spec, annotations=annotations) == []) is valid


def test_a_redis_user_name_must_be_an_option() -> None:
    [(where, message)] = found("RayCluster", changed(CLUSTER, {"headGroupSpec.rayStartParams": {"redis-username": "me"}}))
    assert where == "spec.headGroupSpec.template.spec.containers[0].env"
    assert "redisUsername" in message


@pytest.mark.parametrize("head", [None, {}, {"template": None}])
def test_a_cluster_needs_a_head(head: Any) -> None:
    [(where, message)] = found("RayCluster", {**CLUSTER, "headGroupSpec": head})
    assert where == "spec.headGroupSpec.template.spec.containers"
    assert message == "must not be empty"


def test_a_short_ttl_needs_a_shutdown() -> None:
    [(where, _)] = found("RayJob", {"rayClusterSpec": CLUSTER, "ttlSecondsAfterFinished": 1})
    assert where == "spec.ttlSecondsAfterFinished"


def test_only_kuberays_kinds_are_checked() -> None:
    [(where, message)] = found("RayCronJob", CLUSTER)
    assert (where, message) == ("kind", "must be one of RayCluster, RayJob, RayService")


ALL = "deletionStrategy"
BOTH = {"onSuccess": {"policy": "DeleteCluster"}, "onFailure": {"policy": "DeleteSelf"}}


@pytest.mark.parametrize(
    "changes",
    [
        {"suspend": True, "shutdownAfterJobFinishes": True},
        {"ttlSecondsAfterFinished": 0},
        {"ttlSecondsAfterFinished": 1, "shutdownAfterJobFinishes": True},
        {"activeDeadlineSeconds": 1, "preRunningDeadlineSeconds": 1},
        {"backoffLimit": 0, "submissionMode": "InteractiveMode"},
        {"backoffLimit": 0, "clusterSelector": {"ray.io/cluster": "lab"}},
        {"rayClusterSpec": None, "clusterSelector": {"ray.io/cluster": "lab"}},
        {"submissionMode": "SidecarMode"},
        {"submissionMode": "SidecarMode", "rayClusterSpec.headGroupSpec.template.spec.restartPolicy": "Never"},
        {"submissionMode": "K8sJobMode", "submitterPodTemplate": {"spec": {}}},
        {"runtimeEnvYAML": "a: 1"},
        {ALL: BOTH},
        {ALL: {"onSuccess": {"policy": "DeleteNone"}, "onFailure": {"policy": "DeleteNone"}}},
        {ALL: BOTH, "shutdownAfterJobFinishes": True},
        {ALL: {"deletionRules": [rule("DeleteWorkers", 5), rule("DeleteCluster", 5), rule("DeleteSelf", 6)]}},
        {ALL: {"deletionRules": [rule("DeleteSelf", 5), rule("DeleteCluster", 10, jobStatus="FAILED")]}},
        {ALL: {"deletionRules": [rule("DeleteSelf", 0)]}},
    ],
)
def test_valid_jobs(changes: Changes) -> None:
    assert found("RayJob", changed({"rayClusterSpec": CLUSTER}, changes)) == []


@pytest.mark.parametrize("policy", ["DeleteCluster", "DeleteWorkers"])
def test_a_selected_cluster_is_not_deleted(policy: str) -> None:
    spec = {
        "clusterSelector": {"ray.io/cluster": "lab"},
        "deletionStrategy": {"onSuccess": {"policy": policy}, "onFailure": {"policy": "DeleteSelf"}},
    }
    [(where, message)] = found("RayJob", spec)
    assert where == "spec.deletionStrategy.onSuccess.policy"
    assert message == f"{policy} is not supported with clusterSelector"


@pytest.mark.parametrize(("policy", "valid"), [("DeleteWorkers", False), ("DeleteCluster", True)])
def test_the_autoscaler_would_restart_deleted_workers(policy: str, valid: bool) -> None:
    spec = {"rayClusterSpec": {**CLUSTER, **SCALED}, "deletionStrategy": {"deletionRules": [rule(policy)]}}
    assert (found("RayJob", spec) == []) is valid


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"stepSizePercent": 20}, None),
        ({"stepSizePercent": 21}, "stepSizePercent"),
        ({"stepSizePercent": 0}, None),
        ({"stepSizePercent": -1}, "stepSizePercent"),
        ({"stepSizePercent": 100, "maxSurgePercent": 100}, None),
        ({"stepSizePercent": 101, "maxSurgePercent": 100}, "stepSizePercent"),
        ({"stepSizePercent": 0, "maxSurgePercent": 0}, None),
        ({"stepSizePercent": 0, "maxSurgePercent": -1}, "maxSurgePercent"),
        ({"intervalSeconds": 1}, None),
        ({"intervalSeconds": None}, "intervalSeconds"),
        ({"intervalSeconds": -1}, "intervalSeconds"),
    ],
)
def test_limits_of_an_incremental_upgrade(options: Changes, path: str | None) -> None:
    strategy = {**INCREMENTAL, "clusterUpgradeOptions": {**STEPS, **options}}
    problems = found("RayService", {"rayClusterConfig": {**CLUSTER, **SCALED}, "upgradeStrategy": strategy})
    assert path is None or problems[0][0] == f"spec.upgradeStrategy.clusterUpgradeOptions.{path}"
    assert bool(problems) is bool(path)


def test_the_default_surge_is_the_whole_cluster() -> None:
    steps = {key: value for key, value in STEPS.items() if key != "maxSurgePercent"}
    strategy = {**INCREMENTAL, "clusterUpgradeOptions": {**steps, "stepSizePercent": 100}}
    assert found("RayService", {"rayClusterConfig": {**CLUSTER, **SCALED}, "upgradeStrategy": strategy}) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"upgradeStrategy": {"type": "NewCluster"}},
        {"upgradeStrategy": {"type": "None"}},
        {"rayClusterDeletionDelaySeconds": 0},
        {"rayClusterConfig.headGroupSpec.headService": {"metadata": {"labels": {}}}},
    ],
)
def test_valid_services(changes: Changes) -> None:
    assert found("RayService", changed({"rayClusterConfig": CLUSTER}, changes)) == []


@pytest.mark.parametrize(("timeout", "valid"), [("1", True), ("1.5h", True), ("30", True), ("h", False), ("1d", False)])
def test_units_of_the_initializing_timeout(timeout: str, valid: bool) -> None:
    annotations = {"ray.io/initializing-timeout": timeout}
    assert (found("RayService", {"rayClusterConfig": CLUSTER}, annotations=annotations) == []) is valid


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b"], None),
        (["a", "b", "a"], "the group name a occurs twice"),
        (["a b"], "the group name 'a b' is not a valid label"),
        (["a" * 63], None),
        (["a" * 64], f"the group name '{'a' * 64}' is not a valid label"),
        ([""], "the group name '' is not a valid label"),
    ],
)
def test_names_of_worker_groups(names: list[str], message: str | None) -> None:
    spec = {**CLUSTER, "workerGroupSpecs": [{**WORKERS, "groupName": name} for name in names]}
    assert found("RayCluster", spec) == ([("spec.workerGroupSpecs", message)] if message else [])
