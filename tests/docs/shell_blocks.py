"""Commands in the `sh` blocks of Markdown pages."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
ASSIGNMENT = re.compile(r'^(\w+)="([^"$]*(?:\$\w+[^"$]*)*)"$')
NAME = re.compile(r"\$\{?(\w+)[^}\s/:]*\}?")
ENDS = re.compile(r"^(\||\|\||&|&&|;|>|>>)$")
UNKNOWN = "value"  # in place of a shell variable that the page does not set


@dataclass(frozen=True)
class Line:
    """A simple command: the page, the program and its words."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def lines(page: str, text: str) -> Iterator[Line]:
    """Simple commands of a page in their order, without comments, redirections and the variables set before them."""
    variables: dict[str, str] = {}
    for language, block in BLOCK.findall(text):
        for line in _logical(block) if language == "sh" else ():
            if found := ASSIGNMENT.match(line.strip()):
                variables[found[1]] = found[2]
                continue
            for words in _commands(line, variables):
                yield Line(page, tuple(words))


def files(text: str) -> dict[str, str]:
    """YAML blocks that name their file in a comment on the first line."""
    found = {}
    for language, block in BLOCK.findall(text):
        if language == "yaml" and (name := re.match(r"# ([\w.-]+\.yaml)\n", block)):
            found[name[1]] = block
    return found


def _logical(block: str) -> Iterator[str]:
    """Lines joined at backslashes, without the bodies of here-documents."""
    waiting, end = "", None
    for line in block.splitlines():
        if end is not None:
            end = None if line.strip() == end else end
            continue
        waiting += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        if found := HEREDOC.search(waiting):
            end = found[1]
        yield waiting
        waiting = ""


def _commands(line: str, variables: dict[str, str]) -> Iterator[list[str]]:
    for name, value in variables.items():
        line = re.sub(rf"\${name}\b", lambda _, value=value: value, line)  # type: ignore[misc]
    lexer = shlex.shlex(NAME.sub(UNKNOWN, line), posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation that goes on in the next line
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if ENDS.match(word):
            while command and re.match(r"^[A-Z_]+=", command[0]):
                command = command[1:]
            if command:
                yield command
            command = []
        else:
            command.append(word)


def pages(root: Path) -> dict[str, str]:
    found = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")]
    return {str(path.relative_to(root)): path.read_text() for path in sorted(found) if path.is_file()}
