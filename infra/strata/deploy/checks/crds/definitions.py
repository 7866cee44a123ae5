"""CustomResourceDefinitions in a folder, as written by `make crds`."""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TypeGuard

import yaml

from strata.deploy.documents import Document, KubernetesLoader
from strata.platform.errors import UserError

NAMES = re.compile(r"^  names:\n(?:    .*\n)*?    kind: (\S+)$", re.MULTILINE)


def served(crds: Path, group: str, kind: str) -> dict[str, Document]:
    """Schemas of a kind by version, for the versions that a server accepts; empty if the folder does not define the kind."""
    versions = {}
    for definition in _definitions(crds, group, kind):
        if definition["spec"]["names"]["kind"] == kind:
            for version in definition["spec"]["versions"]:
                if version["served"]:
                    versions[version["name"]] = version["schema"]["openAPIV3Schema"]
    return versions


def kinds(crds: Path, group: str) -> list[str]:
    """Kinds of a group that the folder defines, found without parsing its files."""
    return sorted(kind for text in _texts(crds).values() if f"group: {group}\n" in text for kind in NAMES.findall(text))


def _definitions(crds: Path, group: str, kind: str) -> Iterator[Document]:
    """Definitions of a group, in files that contain `kind`."""
    for file, text in _texts(crds).items():
        if f"group: {group}\n" in text and f"kind: {kind}" in text:
            for document in _parsed(crds, file):
                if _defines(document, group):
                    yield document


@lru_cache(maxsize=256)
def _parsed(crds: Path, file: str) -> tuple[object, ...]:
    """Documents of a file. Files are megabytes long and slow to parse, so they are parsed once, and only if they are needed."""
    return tuple(yaml.load_all(_texts(crds)[file], Loader=KubernetesLoader))


@lru_cache(maxsize=4)
def _texts(crds: Path) -> dict[str, str]:
    texts = {file.name: file.read_text() for file in sorted(crds.glob("*.yaml"))}
    if not any("CustomResourceDefinition" in text for text in texts.values()):
        raise UserError(f"There are no CRDs in {crds}.", "Run 'make crds', or set --crds or STRATA_KUBERAY_CRDS to their folder.")
    return texts


def _defines(document: object, group: str) -> TypeGuard[Document]:
    return (
        isinstance(document, dict)
        and document.get("kind") == "CustomResourceDefinition"
        and (document.get("spec") or {}).get("group") == group
    )
