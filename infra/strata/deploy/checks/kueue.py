"""Rules of Kueue 0.19's admission webhook for ClusterQueues and Cohorts beyond their schemas (pkg/webhooks)."""

from collections.abc import Iterator

from strata.deploy import quantities
from strata.deploy.documents import Document
from strata.deploy.problem import Finding

QUANTITIES = ("nominalQuota", "borrowingLimit", "lendingLimit")


def findings(document: Document) -> Iterator[Finding]:
    spec = document.get("spec") or {}
    if not str(document.get("apiVersion", "")).startswith("kueue.x-k8s.io/"):
        return
    match document["kind"]:
        case "ClusterQueue":
            yield from _groups(spec, has_parent=bool(spec.get("cohortName") or spec.get("cohort")), lends_own=True)
            yield from _admission_checks(spec)
        case "Cohort":
            yield from _groups(spec, has_parent=bool(spec.get("parentName") or spec.get("parent")), lends_own=False)
        case "LocalQueue" if not spec.get("clusterQueue"):
            yield Finding("spec.clusterQueue", "must be set: the queue would never admit a workload")


def _groups(spec: Document, has_parent: bool, lends_own: bool) -> Iterator[Finding]:
    resources: set[str] = set()
    flavors: set[str] = set()
    for i, group in enumerate(spec.get("resourceGroups") or []):
        path, covered = f"spec.resourceGroups[{i}]", group.get("coveredResources") or []
        for name in covered:
            if name in resources:
                yield Finding(f"{path}.coveredResources", f"{name} occurs twice")
            resources.add(name)
        for j, flavor in enumerate(group.get("flavors") or []):
            where = f"{path}.flavors[{j}]"
            if flavor["name"] in flavors:
                yield Finding(f"{where}.name", f"{flavor['name']} occurs twice")
            flavors.add(flavor["name"])
            listed = flavor.get("resources") or []
            if [resource["name"] for resource in listed] != covered:
                yield Finding(f"{where}.resources", f"must be {', '.join(covered)}, in the order of coveredResources")
            for k, resource in enumerate(listed):
                yield from (finding.below(f"{where}.resources[{k}]") for finding in _quota(resource, has_parent, lends_own))


def _quota(resource: Document, has_parent: bool, lends_own: bool) -> Iterator[Finding]:
    amounts = {key: quantities.parse(resource[key]) for key in QUANTITIES if resource.get(key) is not None}
    for key, amount in amounts.items():
        if amount is None:
            yield Finding(key, f"'{resource[key]}' is not a quantity")
        elif amount < 0:
            yield Finding(key, f"{resource[key]} is negative")
        if key != "nominalQuota" and not has_parent:
            yield Finding(key, "needs a cohort")
    lent, own = amounts.get("lendingLimit"), amounts.get("nominalQuota")
    if lends_own and lent is not None and own is not None and lent > own:
        yield Finding("lendingLimit", f"{resource['lendingLimit']} is more than nominalQuota, {resource['nominalQuota']}")


def _admission_checks(spec: Document) -> Iterator[Finding]:
    flavors = {flavor["name"] for group in spec.get("resourceGroups") or [] for flavor in group.get("flavors") or []}
    for i, check in enumerate((spec.get("admissionChecksStrategy") or {}).get("admissionChecks") or []):
        for name in check.get("onFlavors") or []:
            if name not in flavors:
                path = f"spec.admissionChecksStrategy.admissionChecks[{i}].onFlavors"
                yield Finding(path, f"{name} is not a flavor of this queue")
