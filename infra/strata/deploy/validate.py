"""Validates objects without a cluster: schemas, KubeRay's own rules, and references between objects."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from strata.deploy import references, schemas
from strata.deploy.documents import Document, title
from strata.deploy.kuberay import rules
from strata.deploy.problem import Finding, Problem


def problems(documents: list[Document], crds: Path | None) -> list[Problem]:
    """All problems of the objects. `crds` is a folder of KubeRay's CRDs; without it, only the schemas of Ray objects are not
    checked."""
    found = _problems(documents, lambda document: list(_required_fields(document)) or list(_schema(document, crds)))
    if found:  # the other checks rely on types that the schemas guarantee
        return found
    ray = [document for document in documents if _is_ray(document)]
    pairs = references.findings(documents)
    return _problems(ray, rules.findings) + [Problem(title(document), each.path, each.message) for document, each in pairs]


def _problems(documents: list[Document], check: Callable[[Document], Iterable[Finding]]) -> list[Problem]:
    return [Problem(title(document), finding.path, finding.message) for document in documents for finding in check(document)]


def has_schema(document: Document, crds: Path | None) -> bool:
    """True if a schema is available. Objects of other projects' CRDs (monitors, queues) have none."""
    return crds is not None if _is_ray(document) else schemas.kubernetes_has(document["apiVersion"], document["kind"])


def _schema(document: Document, crds: Path | None) -> Iterator[Finding]:
    if _is_ray(document):
        yield from schemas.of_kuberay(document, crds) if crds else _outline(document)
    elif has_schema(document, crds):
        yield from schemas.of_kubernetes(document)


def _is_ray(document: Document) -> bool:
    return str(document["apiVersion"]).startswith(schemas.RAY_GROUP)


def _outline(document: Document) -> Iterator[Finding]:
    """Minimal check of a Ray object without a CRD: the rules can read its fields."""
    try:
        list(rules.findings(document))
        list(references.findings([document]))
    except (AttributeError, KeyError, TypeError) as error:
        yield Finding("spec", f"has a missing field or one of the wrong type ({error}); set --crds to find it")


def _required_fields(document: Document) -> Iterator[Finding]:
    for key in ("apiVersion", "kind"):
        if not isinstance(document.get(key), str):
            yield Finding(key, "is missing")
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        yield Finding("metadata.name", "is missing")
