"""Readers that split a file into documents, by file type: JSONL, Parquet, or UTF-8 text; and readers of whole rows.

Text is never altered: undecodable bytes are an error that names their position. Only non-text files in a folder and rows that
are null or blank are skipped, and both are counted.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError
from strata.training.data import parquet
from strata.training.data.digests import unreadable
from strata.training.data.left_out import LeftOut, shown

# A long text is split into documents of about this many characters, at line ends unless lines are longer. So a single large file
# can still be split into training and validation, and never has to fit in memory.
CHUNK_CHARS = 32_768
HEAD = 8192
BLOCK = 1 << 20

BYTE_ORDER_MARK = codecs.BOM_UTF8
OTHER_UNICODE = {  # UTF-32 first: its byte order mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
PARQUET = b"PAR1"
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Control characters that do not occur in text: all below space except bell, backspace, tab, line ends, form feed and escape.
CONTROL = bytes(set(range(32)) - {7, 8, 9, 10, 11, 12, 13, 27})

Numbered = Iterator[tuple[int, str | None]]
Row = dict[str, Any]


def read_documents(path: Path, text_field: str, alone: bool, left_out: LeftOut) -> Iterator[str]:
    """Documents of a file. A non-text file is an error if `alone`, that is, if the user named the file itself; in a folder it is
    skipped."""
    for _, text in read_numbered(path, text_field, alone, left_out):
        yield text


def read_numbered(path: Path, text_field: str, alone: bool, left_out: LeftOut) -> Iterator[tuple[int, str]]:
    """Documents of a file with the number of their line, row or part, from 1."""
    try:
        kind, unit = _kind(path)
        if unit is None:
            if alone:
                raise UserError(
                    f"{shown(path)} is not text, JSONL or Parquet: {kind}.", "Set data.path to a text, JSONL or Parquet file."
                )
            left_out.files[path] = kind
            return
        left_out.read += 1
        documents = {"line": _jsonl, "row": _parquet, "part": _text}[unit](path, text_field)
        for number, document in documents:
            if text := left_out.nonblank(document, unit, number, shown(path)):
                yield number, text
    except OSError as error:
        raise unreadable(path, error) from None


def read_rows(path: Path, alone: bool, left_out: LeftOut) -> Iterator[tuple[int, Row]]:
    """Rows of a JSONL or Parquet file as objects, with the number of their line or row. Any other file is an error if `alone`;
    in a folder it is skipped."""
    try:
        kind, unit = _kind(path)
        if unit not in ("line", "row"):
            if alone:
                fix = "Name it .jsonl if each of its lines is a JSON object, or use a .jsonl or .parquet file."
                raise UserError(f"{shown(path)} is not JSONL or Parquet: {kind}.", fix)
            left_out.files[path] = kind if unit is None else "not JSONL or Parquet"
            return
        left_out.read += 1
        for number, row in _jsonl_rows(path) if unit == "line" else parquet.read_objects(path):
            left_out.documents += 1
            yield number, row
    except OSError as error:
        raise unreadable(path, error) from None


def unit_of(path: Path) -> str:
    """Unit that `read_numbered` and `read_rows` count in this file: line, row or part."""
    return _kind(path)[1] or "part"


def _kind(path: Path) -> tuple[str, str | None]:
    """File type, and the unit of its documents; the unit is None for a file that is not text."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return "Parquet", "row"
    with path.open("rb") as file:
        head = file.read(HEAD)
    for mark, name in OTHER_UNICODE.items():
        if head.startswith(mark):
            raise UserError(f"{shown(path)} is {name}, not UTF-8.", _converted(name.lower(), path))
    for mark, name in COMPRESSED.items():
        if head.startswith(mark):
            return f"compressed with {name}, decompress it first", None
    if head.startswith(PARQUET):
        return "Parquet without the suffix .parquet", None
    if suffix in (".jsonl", ".ndjson"):
        return "JSONL", "line"
    if head.translate(None, CONTROL) != head:
        return "binary", None
    return "text", "part"


def _text(path: Path, _: str) -> Numbered:
    number, pending = 0, ""
    for text in _decoded(path):
        pending += text
        at = 0
        while len(pending) - at >= 2 * CHUNK_CHARS:
            end = _chunk_end(pending, at)
            number += 1
            yield number, pending[at:end]
            at = end
        pending = pending[at:]
    yield from enumerate(chunks(pending), number + 1)


def chunks(text: str) -> Iterator[str]:
    """Splits a text into documents of about CHUNK_CHARS characters. Joined, they are the text again."""
    at = 0
    while at < len(text):
        end = _chunk_end(text, at)
        yield text[at:end]
        at = end


def _chunk_end(text: str, at: int) -> int:
    """End of the chunk that begins at `at`: after a line end, in a long line after a space, otherwise anywhere."""
    low, high = at + CHUNK_CHARS, at + 2 * CHUNK_CHARS
    if end := text.find("\n", low, high) + 1:
        return end
    if len(text) < high:
        return len(text)
    space = max(text.rfind(character, low, high) for character in " \t\r")
    return space + 1 if space >= 0 else high


def _decoded(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        begin = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
        file.seek(begin)
        line, rest, block = 1, b"", b"."
        while block:
            block = file.read(BLOCK)
            data = rest + block
            try:
                text, used = codecs.utf_8_decode(data, "strict", not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, begin, line, data, error) from None
            if (nul := data.find(0, 0, used)) >= 0:
                at = f"byte {begin + nul:,} (line {line + data.count(10, 0, nul):,})"
                raise UserError(f"{shown(path)} is not text: {at} is NUL.", "Fix the file, or remove it from data.path.")
            yield text
            begin, line, rest = begin + used, line + data.count(10, 0, used), data[used:]


def _jsonl(path: Path, text_field: str) -> Numbered:
    for number, line in _lines(path):
        yield number, _field(line, text_field, f"Line {number:,} of {shown(path)}")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in _lines(path):
        yield number, _object(line, f"Line {number:,} of {shown(path)}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank. Splits at \\n only: other line separators may occur inside a JSON string."""
    begin = 0
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, begin, number, data, error) from None
            begin += len(data)
            if line.strip():
                yield number, line


def _object(line: str, place: str) -> Row:
    """JSON object of a line, in which every key of every object occurs once and every string is text."""

    def once(pairs: list[tuple[str, Any]]) -> Row:
        row = dict(pairs)
        if len(row) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UserError(f"{place} has '{twice}' more than once.", "Fix the line: all but one would be lost.")
        return row

    try:
        row = json.loads(line, object_pairs_hook=once)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}.", "Fix or remove the line.") from None
    if not isinstance(row, dict):
        raise UserError(f"{place} is not an object but {json_kind(row)}.", "Write each line as a JSON object.")
    if ESCAPED_SURROGATE.search(line):
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            cause = f"{place} has an unpaired surrogate, which is not a character."
            raise UserError(cause, "Fix or remove the line.") from None
    return row


def _field(line: str, text_field: str, place: str) -> str | None:
    try:
        row = json.loads(line)
        if line.count(json.dumps(text_field)) > 1:
            json.loads(line, object_pairs_hook=lambda pairs: _once(pairs, text_field, place))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits raise ValueError too
        raise UserError(f"{place} is not JSON: {error}.", "Fix or remove the line.") from None
    if not isinstance(row, dict):
        raise UserError(f"{place} is not an object but {json_kind(row)}.", f'Write each line as {{"{text_field}": "..."}}.')
    if text_field not in row:
        has = ", ".join(row) or "none"
        raise UserError(f"{place} has no text in '{text_field}' (it has: {has}).", "Set data.text_field, or fix the line.")
    text = row[text_field]
    if text is not None and not isinstance(text, str):
        fix = "Set data.text_field to a text field, or fix the line."
        raise UserError(f"{place} has no text in '{text_field}': it is {json_kind(text)}.", fix)
    if text is not None and any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(
            f"{place} has an unpaired surrogate in '{text_field}', which is not a character.", "Fix or remove the line."
        )
    return text


def _once(pairs: list[tuple[str, Any]], text_field: str, place: str) -> dict[str, Any]:
    if [key for key, _ in pairs].count(text_field) > 1:
        raise UserError(f"{place} has '{text_field}' more than once.", "Fix the line: all but one would be lost.")
    return dict(pairs)


def json_kind(value: object) -> str:
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")


def _parquet(path: Path, text_field: str) -> Numbered:
    for number, row in parquet.read(path, lambda schema: parquet.text_column(path, schema, text_field)):
        yield number, row[text_field]


def _not_utf8(path: Path, begin: int, line: int, data: bytes, error: UnicodeDecodeError) -> UserError:
    at = begin + error.start
    line += data.count(b"\n", 0, error.start)
    cause = f"{shown(path)} is not UTF-8: byte {at:,} (line {line:,}) is 0x{data[error.start]:02x}, {error.reason}."
    return UserError(cause, _converted("latin1", path))


def _converted(encoding: str, path: Path) -> str:
    return f"Convert it, for example with iconv -f {encoding} -t utf-8 {shown(path.name)}, or remove it from data.path."
