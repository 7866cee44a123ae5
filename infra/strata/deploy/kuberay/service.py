"""Rules for RayServices: upgrades and timeouts."""

import re
from collections.abc import Iterator

from strata.deploy.documents import Document
from strata.deploy.kuberay.cluster import autoscales, of_cluster
from strata.deploy.problem import Finding

DURATION = re.compile(r"([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h))+")
TIMEOUT_ANNOTATION = "ray.io/initializing-timeout"


def of_service(spec: Document, annotations: dict[str, str]) -> Iterator[Finding]:
    timeout = annotations.get(TIMEOUT_ANNOTATION)
    if timeout and not _is_positive_time(timeout):
        yield Finding(
            f"metadata.annotations.{TIMEOUT_ANNOTATION}", f"'{timeout}' is not a positive duration, such as 30m or 1800"
        )
    cluster = spec.get("rayClusterConfig") or {}
    if (cluster.get("authOptions") or {}).get("enableK8sTokenAuth"):
        yield Finding("spec.rayClusterConfig.authOptions.enableK8sTokenAuth", "is not supported for a RayService")
    yield from of_cluster(cluster, annotations, "spec.rayClusterConfig")
    service = (cluster.get("headGroupSpec") or {}).get("headService") or {}
    if (service.get("metadata") or {}).get("name"):
        yield Finding("spec.rayClusterConfig.headGroupSpec.headService.metadata.name", "must not be set")
    strategy = spec.get("upgradeStrategy") or {}
    if strategy.get("type") not in (None, "None", "NewCluster", "NewClusterWithIncrementalUpgrade"):
        yield Finding("spec.upgradeStrategy.type", "must be NewCluster, NewClusterWithIncrementalUpgrade or None")
    if (spec.get("rayClusterDeletionDelaySeconds") or 0) < 0:
        yield Finding("spec.rayClusterDeletionDelaySeconds", "is negative")
    if strategy.get("type") == "NewClusterWithIncrementalUpgrade":
        yield from (finding.below("spec") for finding in _incremental_upgrade(strategy, cluster))


def _incremental_upgrade(strategy: Document, cluster: Document) -> Iterator[Finding]:
    path = "upgradeStrategy.clusterUpgradeOptions"
    if not autoscales(cluster):
        yield Finding("rayClusterConfig.enableInTreeAutoscaling", "must be true for NewClusterWithIncrementalUpgrade")
    options = strategy.get("clusterUpgradeOptions")
    if options is None:
        yield Finding(path, "must be set for NewClusterWithIncrementalUpgrade")
        return
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent")
    if not 0 <= surge <= 100:
        yield Finding(f"{path}.maxSurgePercent", "must be between 0 and 100")
    if step is None or not 0 <= step <= 100:
        yield Finding(f"{path}.stepSizePercent", "must be between 0 and 100")
    elif step > surge:
        yield Finding(f"{path}.stepSizePercent", f"{step} is more than maxSurgePercent, {surge}")
    if (options.get("intervalSeconds") or 0) <= 0:
        yield Finding(f"{path}.intervalSeconds", "must be positive")
    if not options.get("gatewayClassName"):
        yield Finding(f"{path}.gatewayClassName", "must be set for NewClusterWithIncrementalUpgrade")


def _is_positive_time(text: str) -> bool:
    digits = re.sub(r"[^0-9]", "", text)
    return bool((DURATION.fullmatch(text) or text.isdecimal()) and int(digits) > 0)
