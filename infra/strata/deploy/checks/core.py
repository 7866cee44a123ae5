"""Schemas of Kubernetes' built-in kinds, from the package kubernetes-validate. Unknown fields are errors."""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from strata.deploy.documents import Document
from strata.deploy.problem import Finding, dotted


def findings(document: Document) -> Iterator[Finding]:
    """Findings of an object of a built-in kind."""
    validator = _validator(document["apiVersion"], document["kind"])
    assert validator is not None, "the caller asks knows() first"
    yield from sorted((Finding(dotted(error.absolute_path), error.message) for error in validator.iter_errors(document)), key=str)


def knows(api_version: str, kind: str) -> bool:
    return _validator(api_version, kind) is not None


@lru_cache(maxsize=64)
def is_built_in(api_version: str) -> bool:
    """True for Kubernetes' own API groups, which every server has. Groups of CRDs have their project's domain."""
    group = api_version.rpartition("/")[0]
    if "." in group and not group.endswith(".k8s.io"):
        return False
    return not group or next(_folder().glob(f"*-{group.partition('.')[0]}-v*.json"), None) is not None


@lru_cache(maxsize=256)
def _validator(api_version: str, kind: str) -> Any:
    from referencing import Resource

    file = _folder() / f"{kind.lower()}-{_file_part(api_version)}.json"
    if not file.is_file():
        return None
    schema = json.loads(file.read_text())
    # File names lack the group's domain and the kind's capitals: scheduling.volcano.sh/v1beta1 PodGroup and
    # scheduling.k8s.io/v1beta1 PodGroup have the same one.
    group, _, number = api_version.rpartition("/")
    if {"group": group, "kind": kind, "version": number} not in schema.get("x-kubernetes-group-version-kind", []):
        return None
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions())


@lru_cache(maxsize=1)
def _definitions() -> Any:
    from referencing import Registry, Resource

    return Resource.from_contents(json.loads((_folder() / "_definitions.json").read_text())) @ Registry()


@lru_cache(maxsize=1)
def _folder() -> Path:
    import kubernetes_validate

    schemas = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    return schemas / f"v{kubernetes_validate.latest_version()}-local-strict"


def _file_part(api_version: str) -> str:
    return re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
