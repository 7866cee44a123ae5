"""Rules for parts of a Ray cluster behind alpha feature gates of the operator: mutual TLS, collectors, network policies.

A component that needs a gate labels its objects with `strata.dev/gate-<gate>`: the user has been told to enable it.
"""

from collections.abc import Iterator

from strata.deploy.documents import Document, cluster_spec
from strata.deploy.kuberay.cluster import ray_variables
from strata.deploy.problem import Finding

LABEL = "strata.dev/gate-"
GATES = {
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
    "historyServerOptions": "RayClusterHistoryServer",
}
OF_TLS = ("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
OF_COLLECTORS = (
    *("POD_IP", "FQ_RAY_IP", "RAY_CLUSTER_NAME", "RAY_CLUSTER_NAMESPACE", "RAY_ROLE", "OWNER_KIND", "OWNER_NAME"),
    "EVENTS_PORT",
)
NEEDED_BY_STORAGE = {"gcs": "GCS_BUCKET", "s3": "S3_REGION"}


def of_gates(document: Document) -> Iterator[Finding]:
    found = cluster_spec(document)
    if found is None or found[1] is None:
        return
    path, spec = found
    labels = document["metadata"].get("labels") or {}
    for key, gate in GATES.items():
        if spec.get(key) is None:
            continue
        if f"{LABEL}{gate}" not in labels:
            yield Finding(f"{path}.{key}", f"requires the feature gate {gate}, which is off by default")
        elif key == "tlsOptions":
            yield from (finding.below(path) for finding in _tls(spec))
        elif key == "historyServerOptions":
            yield from (finding.below(f"{path}.{key}") for finding in _history(spec[key]))


def _tls(spec: Document) -> Iterator[Finding]:
    if not spec["tlsOptions"].get("enabled"):
        return
    groups = {"headGroupSpec": spec.get("headGroupSpec") or {}}
    groups |= {f"workerGroupSpecs[{i}]": group for i, group in enumerate(spec.get("workerGroupSpecs") or [])}
    for path, group in groups.items():
        for name in OF_TLS:
            if name in ray_variables(group):
                yield Finding(f"{path}.template.spec.containers[0].env", f"{name} is set by the operator with tlsOptions")


def _history(options: Document) -> Iterator[Finding]:
    collector = options.get("collectorOptions")
    if collector is None:
        yield Finding("collectorOptions", "must be set")
        return
    if not collector.get("image"):
        yield Finding("collectorOptions.image", "must be set")
    variables = {one["name"]: one for one in collector.get("env") or []}
    for name in OF_COLLECTORS:
        if name in variables:
            yield Finding("collectorOptions.env", f"{name} is set by the operator")
    backend = variables.get("STORAGE_BACKEND", {}).get("value")
    if not backend:
        yield Finding("collectorOptions.env", "STORAGE_BACKEND must have a literal value")
        return
    needed = NEEDED_BY_STORAGE.get(backend.lower())
    if needed and not (variables.get(needed, {}).get("value") or variables.get(needed, {}).get("valueFrom")):
        yield Finding("collectorOptions.env", f"STORAGE_BACKEND={backend} needs {needed}")
