"""Recorded traces: Mooncake's JSON lines and Azure's CSV of LLM inference.

| format | fields |
|---|---|
| Mooncake | `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (of the prompt up to each 512 tokens) |
| Azure | `TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens` |

An answer has at least one token, so an output length of 0 counts as 1.
"""

import csv
import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

from strata.platform.errors import UserError, shown
from strata.serving.simulation.requests import HashedText, OwnText, Request, Text

Format = Literal["mooncake", "azure"]
HASHED_TOKENS = 512
MOST_TOKENS = 100_000_000
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_FIX = "Correct or remove this line."


def format_of(path: Path) -> Format:
    """Format by the file's suffix."""
    formats: dict[str, Format] = {".jsonl": "mooncake", ".csv": "azure"}
    if path.suffix not in formats:
        raise UserError(f"{path} has no known suffix.", "Name a Mooncake trace *.jsonl and an Azure trace *.csv.")
    return formats[path.suffix]


def replay(path: Path, block_size: int, requests: int | None = None, speed: float = 1.0) -> Iterator[tuple[float, Request]]:
    """Requests of a trace with their times in seconds, from 0 on, at `speed` times the recorded rate. At most `requests`."""
    kind = format_of(path)
    if kind == "mooncake" and HASHED_TOKENS % block_size:
        raise UserError(
            f"Blocks of {block_size} tokens do not divide the {HASHED_TOKENS} tokens of a hash in a Mooncake trace.",
            "Set --block-size to a power of two up to 512.",
        )
    lines = _mooncake(path, block_size) if kind == "mooncake" else _azure(path)
    began = last = None
    number = 0
    for line, at, request in lines:
        if number == requests:
            return
        if began is None:
            began = at
        if last is not None and at < last:
            _refuse(path, line, "its time is before that of the line above", "Sort the trace by time.")
        last = at
        number += 1
        yield (at - began) / speed, request
    if not number:
        raise UserError(f"{path} has no requests.", "Use a trace with at least one.")


def _open(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", "Check the path of --trace.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8.", "Decompress or convert it.") from None


def _mooncake(path: Path, block_size: int) -> Iterator[tuple[int, float, Request]]:
    per = HASHED_TOKENS // block_size
    for line, text in enumerate(_open(path), 1):
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
        except ValueError:
            _refuse(path, line, f"not JSON: {shown(text)}")
        if not isinstance(entry, dict) or any(name not in entry for name in FIELDS):
            _refuse(path, line, f"not an object with the fields {', '.join(FIELDS)}")
        at = entry["timestamp"]
        if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at):
            _refuse(path, line, f"timestamp is not a number: {shown(at)}")
        hashes = entry["hash_ids"]
        if not isinstance(hashes, list) or any(type(each) is not int or each < 0 for each in hashes):
            _refuse(path, line, "hash_ids is not a list of whole numbers from 0 on")
        prompt = _count(path, line, "input_length", entry["input_length"], 1)
        output = _count(path, line, "output_length", entry["output_length"], 0)
        public = min(len(hashes) * per, prompt // block_size)
        yield line, at / 1000, _request(line, prompt, output, HashedText(line, tuple(hashes), per, public))


def _azure(path: Path) -> Iterator[tuple[int, float, Request]]:
    rows = csv.reader(_open(path))
    header = [name.strip() for name in next(rows, [])]
    if any(name not in header for name in COLUMNS):
        _refuse(path, 1, f"the header lacks one of {', '.join(COLUMNS)}", "Use a trace of the Azure LLM inference data set.")
    places = [header.index(name) for name in COLUMNS]
    for row in rows:
        line = rows.line_num
        if not any(row):
            continue
        if len(row) <= max(places):
            _refuse(path, line, f"{len(row)} columns, and the header has {len(header)}")
        stamp, prompt, output = (row[place].strip() for place in places)
        try:
            at = datetime.fromisoformat(stamp)
        except ValueError:
            _refuse(path, line, f"TIMESTAMP is no date with time: {shown(stamp)}")
        # Only differences count, and all times of a trace are in one zone.
        seconds = (at.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()
        tokens = _count(path, line, "ContextTokens", _whole(prompt), 1)
        answer = _count(path, line, "GeneratedTokens", _whole(output), 0)
        yield line, seconds, _request(line, tokens, answer, OwnText(line))


def _request(number: int, prompt: int, output: int, text: Text) -> Request:
    return Request(number, prompt, max(1, output), text)


def _whole(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text


def _count(path: Path, line: int, name: str, value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= MOST_TOKENS:
        _refuse(path, line, f"{name} is not a whole number from {least} to {MOST_TOKENS}: {shown(value)}")
    return value


def _refuse(path: Path, line: int, cause: str, fix: str = _FIX) -> NoReturn:
    raise UserError(f"{path}:{line}: {cause}.", fix)
