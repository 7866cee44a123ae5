"""Pod Security Standards: pods that the `enforce` label of their namespace would reject.

The server accepts a RayCluster or a DaemonSet whose pods it will reject; only an event of the operator tells of it.
https://kubernetes.io/docs/concepts/security/pod-security-standards
"""

from collections.abc import Iterator

from strata.deploy.documents import Document, containers, pod_templates
from strata.deploy.problem import Finding

ENFORCE = "pod-security.kubernetes.io/enforce"
LEVELS = ("privileged", "baseline", "restricted")
BASELINE_CAPABILITIES = {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE"}
BASELINE_CAPABILITIES |= {"SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def findings(documents: list[Document]) -> Iterator[tuple[Document, Finding]]:
    levels = {}
    for document in documents:
        label = (document["metadata"].get("labels") or {}).get(ENFORCE)
        if document["kind"] == "Namespace" and label is not None:
            levels[document["metadata"]["name"]] = label
            if label not in LEVELS:
                yield document, Finding(f"metadata.labels.{ENFORCE}", f"'{label}' is not one of {', '.join(LEVELS)}")
    for document in documents:
        level = levels.get(document["metadata"].get("namespace"), "privileged")
        for path, template in pod_templates(document):
            for finding in _violations(template, level):
                yield (
                    document,
                    Finding(f"{path}.{finding.path}" if path else finding.path, f"{finding.message} ({ENFORCE}={level})"),
                )


def _violations(template: Document, level: str) -> Iterator[Finding]:
    if level in ("baseline", "restricted"):
        yield from _baseline(template)
    if level == "restricted":
        yield from _restricted(template)


def _baseline(template: Document) -> Iterator[Finding]:
    pod = template["spec"]
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield Finding(f"spec.{field}", "the namespace rejects pods that share the host's namespaces")
    for i, volume in enumerate(pod.get("volumes") or []):
        if "hostPath" in volume:
            yield Finding(f"spec.volumes[{i}].hostPath", "the namespace rejects volumes of the host")
    for path, container in containers(template):
        security = container.get("securityContext") or {}
        if security.get("privileged"):
            yield Finding(f"{path}.securityContext.privileged", "the namespace rejects privileged containers")
        for capability in _added(security):
            if capability not in BASELINE_CAPABILITIES:
                yield Finding(f"{path}.securityContext.capabilities.add", f"the namespace rejects the capability {capability}")
        for i, port in enumerate(container.get("ports") or []):
            if port.get("hostPort"):
                yield Finding(f"{path}.ports[{i}].hostPort", "the namespace rejects ports of the host")
        if _seccomp(pod.get("securityContext"), security) == "Unconfined":
            yield Finding(f"{path}.securityContext.seccompProfile", "the namespace rejects unconfined containers")


def _restricted(template: Document) -> Iterator[Finding]:
    pod = template["spec"]
    whole = pod.get("securityContext") or {}
    for i, volume in enumerate(pod.get("volumes") or []):
        for source in set(volume) - RESTRICTED_VOLUMES - {"name", "hostPath"}:
            yield Finding(f"spec.volumes[{i}]", f"the namespace rejects volumes of the type {source}")
    for path, container in containers(template):
        security = container.get("securityContext") or {}
        if security.get("allowPrivilegeEscalation") is not False:
            yield Finding(f"{path}.securityContext.allowPrivilegeEscalation", "the namespace requires false")
        if security.get("runAsNonRoot", whole.get("runAsNonRoot")) is not True:
            yield Finding(f"{path}.securityContext.runAsNonRoot", "the namespace requires true")
        if security.get("runAsUser", whole.get("runAsUser")) == 0:
            yield Finding(f"{path}.securityContext.runAsUser", "the namespace rejects root")
        if "ALL" not in ((security.get("capabilities") or {}).get("drop") or []):
            yield Finding(f"{path}.securityContext.capabilities.drop", "the namespace requires [ALL]")
        for capability in _added(security):
            if capability in BASELINE_CAPABILITIES and capability != "NET_BIND_SERVICE":
                yield Finding(f"{path}.securityContext.capabilities.add", f"the namespace rejects the capability {capability}")
        if _seccomp(whole, security) not in ("RuntimeDefault", "Localhost", "Unconfined"):
            yield Finding(f"{path}.securityContext.seccompProfile", "the namespace requires RuntimeDefault or Localhost")


def _added(security: Document) -> list[str]:
    return list((security.get("capabilities") or {}).get("add") or [])


def _seccomp(pod: Document | None, container: Document) -> str | None:
    profile: str | None = (container.get("seccompProfile") or (pod or {}).get("seccompProfile") or {}).get("type")
    return profile
