"""Schema validation: built-in kinds by Kubernetes' schemas, other kinds by the CRDs of their projects."""

import difflib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from strata.deploy.checks import core
from strata.deploy.checks.crds import cel, definitions, structural
from strata.deploy.documents import Document
from strata.deploy.problem import Finding


def has_schema(document: Document, crds: Path | None) -> bool:
    """True if the object's kind has a schema. Without one, only other checks apply to it."""
    api_version, kind = document["apiVersion"], document["kind"]
    return core.is_built_in(api_version) or (crds is not None and bool(definitions.served(crds, *_group_kind(api_version, kind))))


def findings(document: Document, crds: Path | None) -> Iterator[Finding]:
    """Findings by the schema of the object's kind; none for a kind without one."""
    api_version, kind = document["apiVersion"], document["kind"]
    group, version = api_version.rpartition("/")[::2]
    if core.knows(api_version, kind):
        yield from core.findings(document)
    elif core.is_built_in(api_version):
        yield Finding("kind", f"Kubernetes has no kind {kind} in {api_version}")
    elif crds is not None:
        versions = definitions.served(crds, group, kind)
        if version in versions:
            yield from _by_definition(document, crds)
        elif versions:
            served = ", ".join(f"{group}/{each}" for each in versions)
            yield Finding("apiVersion", f"{api_version} {kind} is not defined by the CRDs in {crds}, but by {served}")
        elif near := difflib.get_close_matches(kind, definitions.kinds(crds, group), n=1, cutoff=0.9):
            yield Finding("kind", f"{group} has no kind {kind}, but {near[0]}")


def unsupported(document: Document, crds: Path | None) -> Iterator[Finding]:
    """Rules of the object's CRD that were not evaluated."""
    group, version = document["apiVersion"].rpartition("/")[::2]
    if (
        crds is None
        or core.is_built_in(document["apiVersion"])
        or version not in definitions.served(crds, group, document["kind"])
    ):
        return
    schema, _ = _validator(crds, document["apiVersion"], document["kind"])
    if cel.is_available():
        for rule in cel.unsupported(schema, structural.defaulted(schema, document)):
            yield Finding("", f"the rule '{rule}' of its CRD was not evaluated: it uses functions that only Kubernetes has")


def _by_definition(document: Document, crds: Path) -> Iterator[Finding]:
    schema, validator = _validator(crds, document["apiVersion"], document["kind"])
    complete = structural.defaulted(schema, document)
    found = list(structural.findings(validator, complete))
    # The server evaluates rules only on objects that have the schema's types.
    yield from found or (cel.findings(schema, complete) if cel.is_available() else ())


@lru_cache(maxsize=128)
def _validator(crds: Path, api_version: str, kind: str) -> tuple[Document, Any]:
    group, version = api_version.rpartition("/")[::2]
    schema = definitions.served(crds, group, kind)[version]
    return schema, structural.validator(schema)


def _group_kind(api_version: str, kind: str) -> tuple[str, str]:
    return api_version.rpartition("/")[0], kind
