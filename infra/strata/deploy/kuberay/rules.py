"""Validation of KubeRay objects: dispatches to the rules of each kind, and checks names."""

import re
from collections.abc import Iterator

from strata.deploy.documents import Document
from strata.deploy.kuberay.cluster import of_cluster
from strata.deploy.kuberay.gates import of_gates
from strata.deploy.kuberay.job import of_job
from strata.deploy.kuberay.service import of_service
from strata.deploy.problem import Finding

LONGEST = {"RayCluster": 53, "RayJob": 47, "RayService": 47}
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def findings(document: Document) -> Iterator[Finding]:
    kind, metadata, spec = document["kind"], document["metadata"], document.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    if kind not in LONGEST:
        yield Finding("kind", f"must be one of {', '.join(LONGEST)}")
        return
    yield from _name(kind, metadata.get("name", ""))
    yield from of_gates(document)
    match kind:
        case "RayCluster":
            yield from of_cluster(spec, annotations, "spec")
            if (spec.get("upgradeStrategy") or {}).get("type") not in (None, "Recreate", "None"):
                yield Finding("spec.upgradeStrategy.type", "must be Recreate or None")
        case "RayJob":
            yield from of_job(spec, annotations)
        case "RayService":
            yield from of_service(spec, annotations)


def _name(kind: str, name: str) -> Iterator[Finding]:
    if len(name) > LONGEST[kind]:
        yield Finding("metadata.name", f"has {len(name)} characters; a {kind} may have {LONGEST[kind]}")
    if len(name) > 63 or not DNS_1035.fullmatch(name):
        yield Finding(
            "metadata.name", f"'{name}' is not a DNS-1035 label: lowercase letters, digits and '-', beginning with a letter"
        )
