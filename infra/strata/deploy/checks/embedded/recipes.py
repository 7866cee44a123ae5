"""Recipes in ConfigMaps, and the commands of RayJobs that read them."""

import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from strata.deploy.checks.embedded import mounts
from strata.deploy.documents import Document, cluster_spec
from strata.deploy.names import RECIPE_IN_POD
from strata.deploy.problem import Finding
from strata.platform import recipe_file
from strata.platform.errors import UserError

KEY = PurePosixPath(RECIPE_IN_POD).name


def findings(document: Document) -> Iterator[Finding]:
    """Findings of a recipe in a ConfigMap. Its `extends` may name a built-in recipe or another key."""
    data = document.get("data") or {}
    if document["kind"] != "ConfigMap" or KEY not in data:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for key, text in data.items():
            (folder / key).write_text(text)
        try:
            recipe_file.load(str(folder / KEY))
        except UserError as error:
            message = f"{error.cause} {error.fix}".replace(f"{folder}/", "").replace(f"{folder.resolve()}/", "")
            yield Finding(f"data.{KEY}", message)


def of_jobs(documents: list[Document]) -> Iterator[tuple[Document, Finding]]:
    """Findings of the commands of RayJobs: the head must see the recipe that they name."""
    for document in documents:
        found, entrypoint = cluster_spec(document), (document.get("spec") or {}).get("entrypoint")
        if document["kind"] != "RayJob" or found is None:
            continue
        if not entrypoint:
            if document["spec"].get("submissionMode") != "InteractiveMode":
                yield document, Finding("spec.entrypoint", "is not set: the job has no command")
            continue
        try:
            words = shlex.split(entrypoint)
        except ValueError as error:
            yield document, Finding("spec.entrypoint", f"is not a shell command: {error}")
            continue
        head = (found[1].get("headGroupSpec") or {}).get("template")
        for recipe in _named(words):
            if head is not None and (reason := readable(recipe, head, document, documents)):
                yield document, Finding("spec.entrypoint", reason)


def readable(recipe: str, template: Document, document: Document, documents: list[Document]) -> str | None:
    """Reason that a pod cannot read a recipe, which is a path or the name of a built-in one."""
    if "/" not in recipe and not recipe.endswith((".yaml", ".yml")):
        return None if recipe in recipe_file.names() else f"there is no built-in recipe '{recipe}'"
    namespace = document["metadata"].get("namespace")
    maps = {
        each["metadata"]["name"]: each
        for each in documents
        if each["kind"] == "ConfigMap" and each["metadata"].get("namespace") == namespace
    }
    return mounts.problem(template, recipe, maps)


def _named(words: list[str]) -> Iterator[str]:
    if not words or PurePosixPath(words[0]).name != "strata":
        return
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--recipe":
            yield following
        elif word.startswith("--recipe="):
            yield word.removeprefix("--recipe=")
