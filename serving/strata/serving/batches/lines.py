"""Lines of a batch's input, checked before any of them runs, and lines of its output."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from strata.serving.api.requests import MAX_BODY_BYTES
from strata.serving.tenants.estimate import sequences_of

MAX_LINES = 50_000
MAX_ID = 512  # characters of a custom_id
MAX_ERRORS = 100  # reported for one file


@dataclass(frozen=True)
class Line:
    """Position of a request in the input file. Its body is read when it runs: a file may be larger than the memory for it."""

    custom_id: str
    offset: int
    length: int
    sequences: int


@dataclass(frozen=True)
class Checked:
    lines: tuple[Line, ...]
    errors: tuple[dict[str, Any], ...]  # a batch with any of them does not start


class _Wrong(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def check(file: Path, endpoint: str) -> Checked:
    """Reads the whole input. Blank lines are skipped."""
    lines: list[Line] = []
    errors: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    for number, offset, raw in _numbered(file):
        if not raw.strip():
            continue
        try:
            line = _line(raw, offset, endpoint)
            if line.custom_id in seen:
                first = seen[line.custom_id]
                raise _Wrong("duplicate_custom_id", f"The custom_id is that of line {first}.", "custom_id")
            if len(seen) == MAX_LINES:
                errors.append(_error("too_many_lines", f"A batch has at most {MAX_LINES} requests.", None, number))
                break
            seen[line.custom_id] = number
            lines.append(line)
        except _Wrong as wrong:
            errors.append(_error(wrong.code, str(wrong), wrong.param, number))
            if len(errors) == MAX_ERRORS:
                break
    if not lines and not errors:
        errors.append(_error("empty_file", "The file has no request.", None, None))
    return Checked(tuple(lines), tuple(errors))


def body(file: Path, line: Line) -> bytes:
    """Body of a request, as JSON."""
    with file.open("rb") as source:
        source.seek(line.offset)
        return msgspec.json.encode(msgspec.json.decode(source.read(line.length))["body"])


def output(request: str, custom_id: str, status: int, answer: bytes) -> bytes:
    """Line of the output or the error file for an answer."""
    response = {"status_code": status, "request_id": request, "body": _tree(answer)}
    return _dump({"id": f"batch_req_{request}", "custom_id": custom_id, "response": response, "error": None})


def unanswered(request: str, custom_id: str, code: str, message: str) -> bytes:
    """Line of the error file for a request that did not run."""
    error = {"code": code, "message": message}
    return _dump({"id": f"batch_req_{request}", "custom_id": custom_id, "response": None, "error": error})


def _tree(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except ValueError:
        return answer.decode(errors="replace")


def _dump(tree: dict[str, Any]) -> bytes:
    return json.dumps(tree, ensure_ascii=False).encode(errors="replace") + b"\n"


def _numbered(file: Path) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    with file.open("rb") as source:
        number = 0
        while raw := source.readline(MAX_BODY_BYTES + 1):
            number += 1
            yield number, offset, raw
            offset += len(raw)
            if len(raw) > MAX_BODY_BYTES and not raw.endswith(b"\n"):  # reported; the rest of the line is no line
                offset += _skip_line(source)
            os.sched_yield()  # the event loop of the gateway streams in the same process


def _skip_line(source: Any) -> int:
    skipped = 0
    while rest := source.readline(MAX_BODY_BYTES):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _line(raw: bytes, offset: int, endpoint: str) -> Line:
    if len(raw) > MAX_BODY_BYTES:
        raise _Wrong("line_too_large", f"A line has at most {MAX_BODY_BYTES // 2**20} MiB.")
    try:
        tree = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Wrong("invalid_json_line", f"The line is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(tree, dict):
        raise _Wrong("invalid_json_line", "The line is not a JSON object.")
    name, content = tree.get("custom_id"), tree.get("body")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID:
        raise _Wrong("invalid_custom_id", f"'custom_id' must be text of 1 to {MAX_ID} characters.", "custom_id")
    if tree.get("method") != "POST":
        raise _Wrong("invalid_method", "'method' must be POST.", "method")
    if tree.get("url") != endpoint:
        raise _Wrong("invalid_url", f"'url' must be the endpoint of the batch, {endpoint}.", "url")
    if not isinstance(content, dict):
        raise _Wrong("invalid_body", "'body' must be a JSON object.", "body")
    if content.get("stream"):
        raise _Wrong("invalid_body", "A request of a batch cannot stream its answer.", "body.stream")
    if unknown := tree.keys() - {"custom_id", "method", "url", "body"}:
        raise _Wrong("unknown_key", f"A line has no key '{min(unknown)[:50]}'.", min(unknown)[:50])
    return Line(name, offset, len(raw), sequences_of(content))


def _error(code: str, message: str, param: str | None, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
