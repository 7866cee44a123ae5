"""Commands of the documentation: they parse, their targets, modules and overrides exist, and the cheap ones run."""

import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from shell_blocks import Line, files, lines, pages
from support import ROOT
from typer.main import get_command
from typer.testing import CliRunner

from strata.platform import recipe_file
from strata.platform.cli import build
from strata.serving.bench.contenders.contenders import find
from strata.serving.bench.quantized.contenders import named
from strata.serving.terminal import OVERRIDE

PAGES = pages(ROOT)
LINES = [line for page, text in PAGES.items() for line in lines(page, text)]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
DEFAULTS = dict(re.findall(r"^([A-Z]+) \?= (\S+)$", MAKEFILE, re.MULTILINE))
# The `strata` command behind a target, as the Makefile writes it.
BEHIND = dict(re.findall(r"^([a-z-]+):[^\n]*\n\t@\$\(STRATA\) ([^\n]+)", MAKEFILE, re.MULTILINE))
VARIABLES = {"RECIPE", "RUN", "TARGET", "ARGS", "PROFILE", "VENV", "CRDS"}
CHEAP = ("plan", "kernels list", "runs", "deploy check", "deploy render")
PLACEHOLDERS = {"REPOSITORY:TAG": "registry.example/strata:1", "BUCKET": "bucket"}
COSTLY = {"--measure"}  # starts processes that send to each other


def program(name: str) -> list[Line]:
    return list(dict.fromkeys(line for line in LINES if line.words[0] == name))


def behind_make() -> list[Line]:
    """`strata` commands that `make TARGET NAME=value` runs."""
    found = []
    for line in program("make"):
        given = {name: value for name, _, value in (word.partition("=") for word in line.words[1:])}
        for target in BEHIND.keys() & given.keys():
            found.append(Line(line.page, ("strata", *shlex.split(_expanded(BEHIND[target], given)))))
    return found


def _expanded(command: str, given: dict[str, str]) -> str:
    """A line of the Makefile with the variables of the command line, `$(if ...)` included."""
    values = DEFAULTS | given
    command = re.sub(r"\$\(if \$\((\w+)\),(.*?)\)(?= |$)", lambda each: each[2] if given.get(each[1]) else "", command)
    return re.sub(r"\$\((\w+)\)", lambda each: values.get(each[1], ""), command)


def inline() -> list[Line]:
    """`strata` commands with options in the prose, but for those with parts left out."""
    found = [(page, words) for page, text in PAGES.items() for words in re.findall(r"`(strata [a-z][^`]* --[^`]*)`", text)]
    return [Line(page, tuple(shlex.split(words))) for page, words in found if "..." not in words and "$" not in words]


STRATA = list(dict.fromkeys([*program("strata"), *behind_make(), *inline()]))


@cache
def command_line() -> Any:
    return get_command(build())


def parsed(words: tuple[str, ...]) -> dict[str, Any]:
    """Parameters as the command line reads them; nothing is run."""
    command = command_line()
    rest = list(words[1:])
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    try:
        context = command.make_context(shlex.join(words), rest)
    except typer.Exit as done:  # --version
        assert done.exit_code == 0
        return {}
    assert not getattr(command, "commands", {}) or command.params or rest == [], f"no command {words}"
    return {**context.params, "rest": list(context.args)}


@pytest.fixture
def beside_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that pages tell the reader to write."""
    for text in PAGES.values():
        for name, content in files(text).items():
            (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_pages_have_commands() -> None:
    assert len(STRATA) > 50 and {line.page for line in STRATA} >= {"README.md", "docs/serving.md", "docs/cluster-gke.md"}
    assert BEHIND["bench-serve"].startswith("bench serve ") and BEHIND["deploy"].startswith("deploy apply ")


@pytest.mark.slow
@pytest.mark.parametrize("line", STRATA, ids=str)
def test_commands_and_their_options_exist(line: Line, beside_pages: Path, tmp_path: Path) -> None:
    given = parsed(line.words)
    prompts = {word for word in given.get("overrides") or () if given.get("ask") and not OVERRIDE.match(word)}
    overrides = [word for word in given.get("overrides") or () if not word.startswith("[") and word not in prompts]
    if any(word.startswith("model.from=") for word in overrides):  # a model that is neither here nor downloaded
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}')
        overrides = [f"model.from={tmp_path}" if word.startswith("model.from=") else word for word in overrides]
    overrides = [f"train.distill={tmp_path}" if word.startswith("train.distill=") else word for word in overrides]
    if overrides:
        recipe_file.load(given.get("recipe") or recipe_file.DEFAULT, overrides)
    for contender in (given.get("contenders") or "").split(","):
        if contender:
            assert find(contender) if "quantized" not in line.words else named(contender)


@pytest.mark.parametrize("line", program("make"), ids=str)
def test_make_targets_and_variables_exist(line: Line) -> None:
    for word in line.words[1:]:
        name, equals, _ = word.partition("=")
        assert name in (VARIABLES if equals else TARGETS), line


def test_make_targets_in_prose_exist() -> None:
    assert {"demo", "test", "setup", "train", "serve", "chat", "doctor", "clean", "help", "docs"} <= TARGETS
    for page, text in PAGES.items():
        named = set(re.findall(r"`(?:[A-Z]+=\S+ )*make ([a-z-]+)", text))
        assert named <= TARGETS, page


def test_strata_commands_in_prose_exist() -> None:
    """Inline code; options and arguments there are often left out, so only the names are checked."""
    known = command_line().commands
    for page, text in PAGES.items():
        for first, second in re.findall(r"`strata ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", text):
            assert first in known, f"{page}: strata {first}"
            children = getattr(known[first], "commands", {})
            assert not second or not children or second in children, f"{page}: strata {first} {second}"


@pytest.mark.parametrize("line", [line for line in LINES if line.words[0] in ("python", ".venv/bin/python", "pytest")], ids=str)
def test_modules_and_files_exist(line: Line) -> None:
    _, *words = line.words
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1])
    else:
        named = [word for word in words if "/" in word]
        assert named and all((ROOT / word).exists() for word in named)


def cheap() -> list[tuple[str, ...]]:
    """Each command once, however many pages have it."""
    found = [("strata", "--version"), ("strata", "kernels", "list"), ("strata", "plan", "list"), ("strata", "runs")]
    for line in STRATA:
        if shlex.join(line.words[1:]).startswith(CHEAP) and not COSTLY & set(line.words):
            found.append(line.words)
    return list(dict.fromkeys(found))


@pytest.mark.slow
@pytest.mark.parametrize("words", cheap(), ids=shlex.join)
def test_cheap_commands_run(words: tuple[str, ...], beside_pages: Path) -> None:
    filled = [re.sub("|".join(PLACEHOLDERS), lambda each: PLACEHOLDERS[each[0]], word) for word in words[1:]]
    done = CliRunner().invoke(build(), filled)
    assert done.exit_code == 0, done.output or done.exception
    assert done.stdout
