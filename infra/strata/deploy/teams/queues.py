"""Kueue's queues and priorities.

With `deploy.quota_gpus` the queue is the team's, the same in every rendering. Without it, quotas follow from the rendered pods,
so each run has a queue for its job, and each deployment one for its endpoint and lab. A single one would have the quota of the
latest rendering, and an earlier run might never be admitted again.
"""

import copy
from collections.abc import Mapping
from fractions import Fraction

from strata.deploy.documents import RAY_KINDS, Document, title
from strata.deploy.layout import Group
from strata.deploy.names import BASE, GPU_RESOURCE, QUEUE_LABEL
from strata.deploy.quantities import Amounts, add, number, text, times
from strata.deploy.targets import Target
from strata.deploy.teams.quota import cluster_requests, run_quota, team_quota
from strata.deploy.teams.scopes import run_name
from strata.platform.errors import UserError
from strata.platform.recipe import DeploySection

PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"


def set_priority(documents: list[Document], priority: str) -> None:
    """Sets the priority of training and the lab. An endpoint has a class of its own, above them."""
    for document in documents:
        labels = document["metadata"].get("labels") or {}
        if document["kind"] in ("RayJob", "RayCluster") and PRIORITY_LABEL in labels:
            labels[PRIORITY_LABEL] = f"{BASE}-{priority}"


def team_queues(documents: list[Document], whole: list[Document], deploy: DeploySection, target: Target) -> None:
    """Sets the quotas of the team's queues. `whole` are the objects of all parts: the quota must not depend on `--only`."""
    queues = [document for document in documents if document["kind"] == "ClusterQueue"]
    if not queues or deploy.quota_gpus is None:
        return
    devices = {name for queue in queues for name in _covered(queue) if "/" in name}

    def quota(gpus: int) -> Amounts:
        found = team_quota(whole, target, gpus)
        return {name: Fraction(gpus) for name in devices} | found  # a pod has at most as many network devices as GPUs

    wanted = quota(deploy.quota_gpus)
    borrowed = None if deploy.borrow_gpus is None else quota(deploy.borrow_gpus)
    for queue in queues:
        _set(queue, wanted, borrowed, lent=None)
        in_cohort = bool(queue["spec"].get("cohortName"))
        if in_cohort and borrowed is None:
            continue
        most = add(wanted, borrowed) if in_cohort and borrowed is not None else wanted
        for cluster in _users(documents, queue):
            _refuse_larger(cluster, most, deploy)


def own_queues(documents: list[Document], deploy: DeploySection, run: str, groups: Mapping[str, Group]) -> list[Document]:
    """Replaces each queue by one for the run's job and one for the deployment's other clusters, of those that are rendered."""
    queues = [document for document in documents if document["kind"] == "ClusterQueue"]
    locals_of = {queue["metadata"]["name"]: _locals(documents, queue) for queue in queues}
    own: list[Document] = []
    for queue in queues:
        users = _users(documents, queue)
        end = queue["metadata"]["name"].removeprefix(deploy.namespace)
        jobs = [document for document in users if document["kind"] == "RayJob"]
        others = [document for document in users if document["kind"] != "RayJob"]
        for name, clusters in ((run_name(deploy.name, run), jobs), (f"{deploy.name}.deployment", others)):
            if clusters:
                own += _copies(queue, locals_of[queue["metadata"]["name"]], clusters, name + end, deploy, groups)
    left = [document for document in documents if document["kind"] not in ("ClusterQueue", "LocalQueue")]
    return [*left, *own]


def _copies(
    queue: Document,
    locals_: list[Document],
    clusters: list[Document],
    name: str,
    deploy: DeploySection,
    groups: Mapping[str, Group],
) -> list[Document]:
    """A queue of the given name for some Ray clusters. It lends and borrows nothing: its quota is not that of nodes."""
    wanted = run_quota(clusters, deploy.nodes, groups)
    copies = copy.deepcopy([queue, *locals_])
    copies[0]["metadata"]["name"] = f"{deploy.namespace}.{name}"
    _set(copies[0], wanted, times(0, wanted), times(0, wanted))
    for local in copies[1:]:
        local["metadata"]["name"], local["spec"]["clusterQueue"] = name, f"{deploy.namespace}.{name}"
    for cluster in clusters:
        cluster["metadata"]["labels"][QUEUE_LABEL] = name
    return copies


def _locals(documents: list[Document], queue: Document) -> list[Document]:
    name = queue["metadata"]["name"]
    return [each for each in documents if each["kind"] == "LocalQueue" and each["spec"]["clusterQueue"] == name]


def _users(documents: list[Document], queue: Document) -> list[Document]:
    """Ray objects that wait in a queue."""
    names = {local["metadata"]["name"] for local in _locals(documents, queue)}
    clusters = [document for document in documents if document["kind"] in RAY_KINDS]
    return [document for document in clusters if (document["metadata"].get("labels") or {}).get(QUEUE_LABEL) in names]


def _covered(queue: Document) -> list[str]:
    return [name for group in queue["spec"]["resourceGroups"] for name in group["coveredResources"]]


def _set(queue: Document, wanted: Amounts, borrowed: Amounts | None, lent: Amounts | None) -> None:
    """Sets a queue's quotas, of the resources in the manifest and of all others that pods request. A flavor without a resource,
    such as that of heads without GPUs, stays without it. None is no limit, which is the only choice outside a cohort."""
    [group] = queue["spec"]["resourceGroups"]
    covered = list(dict.fromkeys([*group["coveredResources"], *sorted(wanted)]))
    group["coveredResources"] = covered
    limits = {"borrowingLimit": borrowed, "lendingLimit": lent} if queue["spec"].get("cohortName") else {}
    for flavor in group["flavors"]:
        before = {resource["name"]: number(resource["nominalQuota"]) for resource in flavor["resources"]}
        lacks = {name for name in covered if before.get(name, before.get(GPU_RESOURCE) if "/" in name else None) == 0}
        flavor["resources"] = [
            {"name": name, "nominalQuota": _text(name, {} if name in lacks else wanted)}
            | {key: _text(name, {} if name in lacks else limit) for key, limit in limits.items() if limit is not None}
            for name in covered
        ]


def _text(resource: str, amounts: Amounts) -> str:
    return text(resource, amounts.get(resource, Fraction(0)))


def _refuse_larger(cluster: Document, most: Amounts, deploy: DeploySection) -> None:
    for resource, amount in cluster_requests(cluster).items():
        if amount > most.get(resource, 0):
            raise UserError(
                f"{title(cluster)} requests {text(resource, amount)} of {resource}, but the team's queue admits at most "
                f"{_text(resource, most)}: deploy.quota_gpus={deploy.quota_gpus}, deploy.borrow_gpus={deploy.borrow_gpus}.",
                "Make the cluster smaller, or raise deploy.quota_gpus or deploy.borrow_gpus.",
            )
