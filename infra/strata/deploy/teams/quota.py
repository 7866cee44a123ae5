"""Kueue's quotas, added up from the requests of the rendered pods.

Kueue admits a Ray cluster as a whole: its head with the autoscaler's container, all workers, and the pod that submits the job. It
never admits one that requests a resource which the queue does not cover, or more of it than the quota.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from strata.deploy.documents import RAY_KINDS, Document, cluster_spec, worker_groups
from strata.deploy.layout import Group, head_growth
from strata.deploy.names import GPU_RESOURCE
from strata.deploy.quantities import GIB, Amounts, add, largest, number, times
from strata.deploy.targets import Target


def cluster_requests(document: Document) -> Amounts:
    """Requests of a Ray cluster at its maximum size, as Kueue counts them."""
    groups = worker_groups(document)
    workers = (times(group["maxReplicas"] * group.get("numOfHosts", 1), _pod(group["template"])) for group in groups)
    return add(_overhead(document), *workers)


def team_quota(whole: list[Document], target: Target, gpus: int) -> Amounts:
    """Quota that admits any Ray clusters with `gpus` GPUs in total. It follows from the target and the manifests, not from a
    recipe, so all runs of a team render the same. GPUs are what the quota limits; the rest suffices for the worst case: each GPU
    is of the machine with the most CPUs and memory for it, is alone in its pod, and is a Ray cluster of its own with a head."""
    clusters = [document for document in whole if document["kind"] in RAY_KINDS]
    pods = [_pod(group["template"]) for document in clusters for group in worker_groups(document)]
    machines = [machine for gpu in target.gpus.values() for machine in gpu.machines]
    share = largest(
        *(
            {"cpu": Fraction(machine.cpus, machine.gpus), "memory": Fraction(machine.memory_gib * GIB, machine.gpus)}
            for machine in machines
        )
    )
    pod = largest(*pods) | share | {GPU_RESOURCE: Fraction(1)}
    head = largest(*(_overhead(document) for document in clusters))
    cpus, gib = head_growth(gpus)
    return add(times(gpus, pod), times(gpus, head), {"cpu": Fraction(cpus), "memory": Fraction(gib * GIB)})


def run_quota(clusters: list[Document], nodes: int | None, groups: Mapping[str, Group]) -> Amounts:
    """Quota for the largest of some Ray clusters; the others queue behind it. With `deploy.nodes`, for all of these nodes."""
    wanted = largest(*(cluster_requests(document) for document in clusters))
    node_gpus = max((group.node_gpus for group in groups.values()), default=0)
    more = (nodes or 0) * node_gpus - wanted.get(GPU_RESOURCE, Fraction(0))
    if more <= 0:
        return wanted
    pods = [_pod(group["template"]) for document in clusters for group in worker_groups(document)]
    of_a_gpu = largest(*(times(1 / pod[GPU_RESOURCE], pod) for pod in pods if pod.get(GPU_RESOURCE)))
    return add(wanted, times(more, of_a_gpu), *(_overhead(document) for document in clusters))


def _overhead(document: Document) -> Amounts:
    """Requests of a Ray cluster's pods without GPUs: the head, with the autoscaler, and the submitter."""
    spec: Document = document["spec"]
    found = cluster_spec(document)
    cluster: Document = found[1] if found else {}
    amounts = [_pod((cluster.get("headGroupSpec") or {}).get("template") or {})]
    if cluster.get("enableInTreeAutoscaling"):
        amounts.append(_requests(cluster.get("autoscalerOptions") or {}))
    if "submitterPodTemplate" in spec:
        amounts.append(_pod(spec["submitterPodTemplate"]))
    return add(*amounts)


def _pod(template: Document) -> Amounts:
    """Effective requests of a pod: all containers and sidecars together, or an init container if it requests more."""
    spec = template.get("spec") or {}
    first = spec.get("initContainers") or []
    sidecars = [container for container in first if container.get("restartPolicy") == "Always"]
    together = add(*(_requests(container) for container in [*(spec.get("containers") or []), *sidecars]))
    return largest(together, *(_requests(container) for container in first if container not in sidecars))


def _requests(container: Document) -> Amounts:
    """Requests of a container; Kubernetes takes the limit of a resource without a request."""
    resources: dict[str, Any] = container.get("resources") or {}
    merged = (resources.get("limits") or {}) | (resources.get("requests") or {})
    return {resource: number(quantity) for resource, quantity in merged.items()}
