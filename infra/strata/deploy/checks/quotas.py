"""Kueue quotas: a workload that requests more than its queue can ever give waits forever without a message."""

import math
from collections.abc import Iterator
from fractions import Fraction

from strata.deploy import quantities
from strata.deploy.documents import Document, cluster_spec
from strata.deploy.problem import Finding

QUEUE = "kueue.x-k8s.io/queue-name"


def findings(documents: list[Document]) -> Iterator[tuple[Document, Finding]]:
    by_key = {(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]): each for each in documents}
    for document in documents:
        labels, namespace = document["metadata"].get("labels") or {}, document["metadata"].get("namespace")
        local = by_key.get(("LocalQueue", namespace, labels.get(QUEUE, "")))
        name = ((local or {}).get("spec") or {}).get("clusterQueue", "")
        cluster = by_key.get(("ClusterQueue", None, name)) if cluster_spec(document) else None
        if cluster is not None:
            yield from ((document, finding) for finding in _fits(document, cluster))


def _fits(document: Document, queue: Document) -> Iterator[Finding]:
    name, most = queue["metadata"]["name"], _quota(queue.get("spec") or {})
    for resource, amount in sorted(_requested(document).items()):
        if amount == 0:
            continue
        if resource not in most:
            yield Finding(f"metadata.labels.{QUEUE}", f"requests {resource}, which ClusterQueue {name} does not cover")
        elif amount > most[resource]:
            wanted, given = (float(each) for each in (amount, most[resource]))
            yield Finding(f"metadata.labels.{QUEUE}", f"requests {wanted:g} {resource}; ClusterQueue {name} has {given:g}")


def _quota(spec: Document) -> dict[str, Fraction | float]:
    """Most that a queue can give of each resource, over all flavors. In a cohort it also borrows, without a limit by default."""
    borrows = bool(spec.get("cohortName") or spec.get("cohort"))
    total: dict[str, Fraction | float] = {}
    for group in spec.get("resourceGroups") or []:
        for flavor in group.get("flavors") or []:
            for resource in flavor.get("resources") or []:
                quota: Fraction | float = quantities.parse(resource["nominalQuota"]) or Fraction(0)
                if borrows:
                    limit = resource.get("borrowingLimit")
                    quota += math.inf if limit is None else quantities.parse(limit) or 0
                total[resource["name"]] = total.get(resource["name"], Fraction(0)) + quota
    return total


def _requested(document: Document) -> dict[str, Fraction]:
    """Requests of all pods that Kueue counts: the head, the workers, and the pod that submits a job."""
    found, spec = cluster_spec(document), document["spec"]
    cluster = found[1] if found else {}
    pods = [(1, (cluster.get("headGroupSpec") or {}).get("template") or {}), (1, spec.get("submitterPodTemplate") or {})]
    for group in cluster.get("workerGroupSpecs") or []:
        pods.append((group.get("replicas", 1) * group.get("numOfHosts", 1), group.get("template") or {}))
    total: dict[str, Fraction] = {}
    for count, template in pods:
        for container in (template.get("spec") or {}).get("containers") or []:
            resources = container.get("resources") or {}
            for name, amount in ((resources.get("limits") or {}) | (resources.get("requests") or {})).items():
                total[name] = total.get(name, Fraction(0)) + count * (quantities.parse(amount) or 0)
    return total
