"""Diff of rendered manifests against the cluster or against a previous rendering."""

import difflib
from dataclasses import dataclass
from pathlib import Path

import yaml

from strata.deploy import kubectl
from strata.deploy.documents import Document, read, title, write
from strata.platform.errors import UserError

FIELD_MANAGER = "strata"


@dataclass(frozen=True)
class Changes:
    """`against` describes the other side of the comparison. `text` is empty if nothing changes."""

    against: str
    text: str


def against_cluster(documents: list[Document]) -> Changes:
    version = kubectl.server_version()
    if version is None:
        raise UserError(
            "kubectl cannot reach a cluster to compare with.",
            "Set a context (kubectl config use-context), or compare with a previous rendering (--against DIR).",
        )
    where = f"the cluster '{kubectl.context()}' ({version})"
    new = _missing_namespaces(documents)
    if new:  # kubectl diff fails for objects in a namespace that does not exist
        listed = "".join(f"+ {title(document)}\n" for document in documents)
        return Changes(f"{where}, which has no namespace {', '.join(new)} yet: everything is new", listed)
    words = ["diff", "--server-side", f"--field-manager={FIELD_MANAGER}", "--filename=-"]
    answer = kubectl.run(words, stdin=write(documents))
    if answer.returncode > 1:  # kubectl exits with 1 if there are differences
        raise kubectl.failure(words, answer, "Fix the reported error. For an unknown kind, install its operator first.")
    return Changes(where, answer.stdout)


def against_folder(documents: list[Document], former: Path) -> Changes:
    files = sorted(former.glob("*.yaml")) if former.is_dir() else [former]
    if not files or not files[0].is_file():
        raise UserError(f"There is no rendering at {former}.", "Write it with 'strata deploy render -o DIR'.")
    try:
        before = _by_title([document for file in files for document in read(file.read_text())])
    except yaml.YAMLError as error:
        raise UserError(f"{former} is not valid YAML: {' '.join(str(error).split())}", "Render it again.") from None
    after = _by_title(documents)
    lines: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        old, new = (_lines(side.get(name)) for side in (before, after))
        lines += difflib.unified_diff(old, new, f"before/{name}", f"after/{name}")
    return Changes(f"the rendering at {former}", "".join(lines))


def _missing_namespaces(documents: list[Document]) -> list[str]:
    names = [document["metadata"]["name"] for document in documents if document["kind"] == "Namespace"]
    return [name for name in names if kubectl.run(["get", "namespace", name, "--ignore-not-found", "--output=name"]).stdout == ""]


def _by_title(documents: list[Document]) -> dict[str, Document]:
    return {title(document): document for document in documents}


def _lines(document: Document | None) -> list[str]:
    return write([document]).splitlines(keepends=True) if document else []
