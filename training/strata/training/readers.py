"""One file to its documents, by what the file is: JSONL, Parquet, or anything that is UTF-8 text."""

import json
from collections.abc import Iterator
from pathlib import Path

from strata.platform.errors import UserError

# A long text is cut, at a line's end, into documents of about this many characters, so that one big file
# can still be split into training and validation and never has to fit in memory.
PIECE = 32_768


def read_documents(path: Path, text_field: str, alone: bool) -> Iterator[str]:
    """`alone` marks a file the user named: one that is not text is then an error, where a folder's is passed over."""
    if path.suffix in (".jsonl", ".ndjson"):
        documents = _jsonl(path, text_field)
    elif path.suffix == ".parquet":
        documents = _parquet(path, text_field)
    elif _is_text(path):
        documents = _text(path)
    elif alone:
        raise UserError(f"{path} is not UTF-8 text.", "Give a text, JSONL or Parquet file.")
    else:
        return
    yield from (document for document in documents if document.strip())


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(8192)
    try:
        head[: head.rfind(b"\n") + 1 or len(head)].decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _text(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        while lines := file.readlines(PIECE):
            yield "".join(lines)


def _jsonl(path: Path, text_field: str) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"Line {number} of {path} is not JSON: {error}.", "Mend or remove the line.") from None
            if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
                has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise UserError(f"Line {number} of {path} has no text in '{text_field}' (it has: {has}).", "Set data.text_field.")
            yield row[text_field].encode(errors="replace").decode()  # JSON can write half a surrogate pair, which is no text


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is not Parquet: {error}.", "Mend or remove the file.") from None
    columns = file.schema_arrow.names
    if text_field not in columns:
        raise UserError(f"{path} has no column '{text_field}'.", f"Set data.text_field to one of: {', '.join(columns)}.")
    for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
        yield from (str(value) for value in batch.column(0).to_pylist() if value is not None)
