"""Validates objects without a cluster: schemas, KubeRay's own rules, texts inside objects, and references between them."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from strata.deploy.checks import choices, kueue, pod_security, pods, quotas, references, schemas, selectors, syntax
from strata.deploy.checks.crds import cel
from strata.deploy.checks.embedded import prometheus_rules, recipes, serve_config, texts
from strata.deploy.documents import Document, title
from strata.deploy.kuberay import rules
from strata.deploy.problem import Finding, Problem

RAY_GROUP = "ray.io/"
OF_ONE = (
    syntax.findings,
    choices.findings,
    pods.findings,
    kueue.findings,
    texts.findings,
    recipes.findings,
    prometheus_rules.findings,
)
OF_ALL = (
    references.findings,
    selectors.findings,
    pod_security.findings,
    quotas.findings,
    serve_config.findings,
    recipes.of_jobs,
)


def problems(documents: list[Document], crds: Path | None) -> list[Problem]:
    """All problems of the objects. `crds` is a folder of CRDs. Kinds without a schema are checked by the other rules only."""
    found = _problems(documents, lambda document: list(_required_fields(document)) or list(_schema(document, crds)))
    if found:  # the other checks rely on types that the schemas guarantee
        return found
    return _problems(documents, alone) + between(documents)


def notes(documents: list[Document], crds: Path | None) -> list[Problem]:
    """Facts that a check without a cluster cannot establish: objects that must exist, and rules that were not evaluated."""
    unsupported = _problems(documents, lambda document: schemas.unsupported(document, crds))
    return unsupported + _of_pairs(references.notes(documents))


def has_schema(document: Document, crds: Path | None) -> bool:
    """True if a schema is available for the object's kind."""
    return schemas.has_schema(document, crds)


def evaluates_rules() -> bool:
    """True if the CEL rules of CRDs are evaluated."""
    return cel.is_available()


def _problems(documents: list[Document], check: Callable[[Document], Iterable[Finding]]) -> list[Problem]:
    return [Problem(title(document), finding.path, finding.message) for document in documents for finding in check(document)]


def _of_pairs(pairs: Iterable[tuple[Document, Finding]]) -> list[Problem]:
    return [Problem(title(document), finding.path, finding.message) for document, finding in pairs]


def alone(document: Document) -> Iterator[Finding]:
    """Findings about a single object that has its schema's types."""
    if str(document["apiVersion"]).startswith(RAY_GROUP):
        yield from rules.findings(document)
    for check in OF_ONE:
        yield from check(document)


def between(documents: list[Document]) -> list[Problem]:
    """Problems of objects that depend on other objects."""
    return _of_pairs(pair for check in OF_ALL for pair in check(documents))


def _schema(document: Document, crds: Path | None) -> Iterator[Finding]:
    yield from schemas.findings(document, crds)
    if not has_schema(document, crds):
        yield from _outline(document)


def _outline(document: Document) -> Iterator[Finding]:
    """Minimal check of an object without a schema: the other checks can read its fields."""
    try:
        list(alone(document))
        between([document])
        list(selectors.findings([document], whole=True))
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        yield Finding("spec", f"has a missing field or one of the wrong type ({error}); set --crds to find it")


def _required_fields(document: Document) -> Iterator[Finding]:
    for key in ("apiVersion", "kind"):
        if not isinstance(document.get(key), str):
            yield Finding(key, "is missing")
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        yield Finding("metadata.name", "is missing")
