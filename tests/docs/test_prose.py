"""Prose of code and documentation: openings of docstrings, and words that only this project would use."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml"}
QUESTIONS = {"what", "which", "how", "whether", "whose", "of"}  # a docstring opens with a noun or a verb that a search would find
PRIVATE = (
    "desk",
    "fate",
    "hunt",
    "kept",
    "lean",
    "misfit",
    "misfits",
    "piece",
    "pieces",
    "room",
    "rooms",
    "said",
    "sheet",
    "sheets",
)
# In prose, and as a part of an identifier.
WORDS = re.compile(rf"(?<![a-z])({'|'.join(PRIVATE)})(?![a-z])", re.IGNORECASE)
ALLOWED = {
    "tests/docs/test_prose.py": set(PRIVATE),
}


def files(root: Path) -> Iterator[tuple[str, str]]:
    for place in sorted(root.iterdir()):
        if (place.name.startswith(".") and place.name != ".github") or place.name in ("runs", "dist"):  # ignored by git
            continue
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.suffix in SUFFIXES and path.is_file():
                yield path.relative_to(root).as_posix(), path.read_text()


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield getattr(node, "lineno", 1), text


@pytest.mark.slow
def test_docstrings_open_with_a_noun_or_a_verb(root: Path) -> None:
    found = [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name, source in files(root)
        if name.endswith(".py")
        for line, text in docstrings(source)
        if text.split()[0].strip(",.:").lower() in QUESTIONS
    ]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_private_words_are_gone(root: Path) -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in files(root)
        for number, line in enumerate(text.splitlines(), 1)
        if {word.lower() for word in WORDS.findall(line)} - ALLOWED.get(name, set())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("line", ["said = 1", "_kept_bytes", "No room is left.", "HUNT"])
def test_the_check_finds_private_words(line: str) -> None:
    assert WORDS.search(line)


@pytest.mark.parametrize("line", ["clean", "mushroom", "spreadsheet", "broom"])
def test_the_check_ignores_parts_of_words(line: str) -> None:
    assert not WORDS.search(line)
