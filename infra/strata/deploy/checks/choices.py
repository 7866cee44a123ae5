"""Fields of built-in kinds and pods with a fixed set of values, which Kubernetes' schemas leave open."""

from collections.abc import Iterator
from typing import Any

from strata.deploy.documents import Document, pod_templates
from strata.deploy.problem import Finding

PROTOCOLS = ("TCP", "UDP", "SCTP")
# Values by the names of a field and of the field that holds it; None stands for any.
CHOICES: dict[tuple[str | None, str], tuple[str, ...]] = {
    (None, "restartPolicy"): ("Always", "OnFailure", "Never"),
    (None, "imagePullPolicy"): ("Always", "IfNotPresent", "Never"),
    (None, "dnsPolicy"): ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    (None, "terminationMessagePolicy"): ("File", "FallbackToLogsOnError"),
    (None, "fsGroupChangePolicy"): ("OnRootMismatch", "Always"),
    (None, "whenUnsatisfiable"): ("DoNotSchedule", "ScheduleAnyway"),
    (None, "protocol"): PROTOCOLS,
    (None, "accessModes"): ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"),
    (None, "persistentVolumeReclaimPolicy"): ("Retain", "Recycle", "Delete"),
    (None, "volumeMode"): ("Filesystem", "Block"),
    (None, "policyTypes"): ("Ingress", "Egress"),
    (None, "sessionAffinity"): ("None", "ClientIP"),
    (None, "externalTrafficPolicy"): ("Cluster", "Local"),
    (None, "unhealthyPodEvictionPolicy"): ("IfHealthyBudget", "AlwaysAllow"),
    (None, "concurrencyPolicy"): ("Allow", "Forbid", "Replace"),
    ("tolerations", "operator"): ("Exists", "Equal", "Lt", "Gt"),
    ("tolerations", "effect"): ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    ("seccompProfile", "type"): ("RuntimeDefault", "Localhost", "Unconfined"),
    ("emptyDir", "medium"): ("", "Memory", "HugePages"),
    ("updateStrategy", "type"): ("RollingUpdate", "OnDelete"),
    ("strategy", "type"): ("RollingUpdate", "Recreate"),
}
OBJECTS = ("Service", "NetworkPolicy", "PersistentVolume", "PersistentVolumeClaim", "PodDisruptionBudget", "CronJob")
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "Job", "Pod")


def findings(document: Document) -> Iterator[Finding]:
    if document["kind"] in OBJECTS + WORKLOADS:
        yield from _walk(document.get("spec"), "spec", None)
        return
    for path, template in pod_templates(document):
        yield from _walk(template.get("spec"), f"{path}.spec", None)


def _walk(node: Any, path: str, holder: str | None) -> Iterator[Finding]:
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from _walk(item, f"{path}[{i}]", holder)
    for field, value in node.items() if isinstance(node, dict) else ():
        allowed = CHOICES.get((holder, field)) or CHOICES.get((None, field))
        if allowed is not None:
            for each in value if isinstance(value, list) else [value]:
                if each is not None and each not in allowed:
                    yield Finding(f"{path}.{field}", f"'{each}' is not one of {', '.join(filter(None, allowed))}")
        yield from _walk(value, f"{path}.{field}", field)
