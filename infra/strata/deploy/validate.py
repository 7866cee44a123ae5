"""Whether a cluster would take these objects, without one: schemas, KubeRay's own rules, and what they say of each other."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from strata.deploy import references, schemas
from strata.deploy.documents import Document, title
from strata.deploy.kuberay import rules
from strata.deploy.problem import Finding, Problem


def problems(documents: list[Document], crds: Path | None) -> list[Problem]:
    """Without `crds`, a folder of KubeRay's CRDs, the schemas of Ray objects are left out; nothing else is."""
    found = _told(documents, lambda document: list(_anatomy(document)) or list(_schema(document, crds)))
    if found:  # the rest reads fields whose types the schemas have held
        return found
    ray = [document for document in documents if _is_ray(document)]
    pairs = references.findings(documents)
    return _told(ray, rules.findings) + [Problem(title(document), each.path, each.message) for document, each in pairs]


def _told(documents: list[Document], look: Callable[[Document], Iterable[Finding]]) -> list[Problem]:
    return [Problem(title(document), finding.path, finding.message) for document in documents for finding in look(document)]


def has_schema(document: Document, crds: Path | None) -> bool:
    """Whether there is one here; objects of other projects' CRDs (monitors, queues) have none."""
    return crds is not None if _is_ray(document) else schemas.kubernetes_has(document["apiVersion"], document["kind"])


def _schema(document: Document, crds: Path | None) -> Iterator[Finding]:
    if _is_ray(document):
        yield from schemas.of_kuberay(document, crds) if crds else _outline(document)
    elif has_schema(document, crds):
        yield from schemas.of_kubernetes(document)


def _is_ray(document: Document) -> bool:
    return str(document["apiVersion"]).startswith(schemas.RAY_GROUP)


def _outline(document: Document) -> Iterator[Finding]:
    """In place of a CRD: enough for the rules to read a Ray object, no more."""
    try:
        list(rules.findings(document))
        list(references.findings([document]))
    except (AttributeError, KeyError, TypeError) as error:
        yield Finding("spec", f"has a field missing or of the wrong type ({error}); KubeRay's CRDs would tell which")


def _anatomy(document: Document) -> Iterator[Finding]:
    for key in ("apiVersion", "kind"):
        if not isinstance(document.get(key), str):
            yield Finding(key, "is missing")
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        yield Finding("metadata.name", "is missing")
