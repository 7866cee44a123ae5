"""Rows of a Parquet file. Damage and columns that are not what they should be are errors that name the row or the column."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError
from strata.training.data.left_out import shown

Row = dict[str, Any]


def read_objects(path: Path) -> Iterator[tuple[int, Row]]:
    """Rows with their numbers, from 1. Keys that are null are absent."""
    for number, row in read(path, lambda schema: _all_columns(path, schema)):
        yield number, without_nulls(row)


def without_nulls(value: Any) -> Any:
    """Value without keys that are null. Arrow gives every object of a column all keys that any of them has."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def read(path: Path, columns: Callable[[Any], list[str]]) -> Iterator[tuple[int, Row]]:
    """Rows of the columns that `columns` chooses from the schema."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{shown(path)} is not Parquet: {_one_line(error)}.", "Fix or remove the file.") from None
    with file:
        names = columns(file.schema_arrow)
        number, name = 0, ""
        try:
            for batch in file.iter_batches(batch_size=1024, columns=names):
                for index in range(batch.num_rows):
                    row = {}
                    for name in names:
                        row[name] = batch.column(name)[index].as_py()
                    number += 1
                    yield number, row
        except UnicodeDecodeError as error:
            cause = f"Row {number + 1:,} of {shown(path)} is not UTF-8 in '{name}': {_one_line(error)}."
            raise UserError(cause, "Rewrite the column as UTF-8 strings, or remove the file from data.path.") from None
        except (pyarrow.ArrowException, OSError) as error:
            cause = f"{shown(path)} is damaged after row {number:,} of {file.metadata.num_rows:,}: {_one_line(error)}."
            raise UserError(cause, "Restore or rewrite the file, or remove it from data.path.") from None
        if number != file.metadata.num_rows:
            cause = f"{shown(path)} has {number:,} rows, but its footer lists {file.metadata.num_rows:,}."
            raise UserError(cause, "Restore or rewrite the file, or remove it from data.path.")


def _all_columns(path: Path, schema: Any) -> list[str]:
    names: list[str] = schema.names
    if twice := next((name for name in names if names.count(name) > 1), None):
        cause = f"{shown(path)} has {names.count(twice)} columns named '{twice}'."
        raise UserError(cause, "Rewrite the file with one: the others would be lost.")
    return names


def text_column(path: Path, schema: Any, text_field: str) -> list[str]:
    """The column of that name, which must be the only one and hold strings."""
    texts = [field.name for field in schema if _is_text(field.type)]
    fix = f"Set data.text_field to one of: {', '.join(texts)}." if texts else "Add a column of strings: it has none."
    if text_field not in schema.names:
        raise UserError(f"{shown(path)} has no column '{text_field}' (it has: {', '.join(schema.names)}).", fix)
    if schema.names.count(text_field) > 1:
        cause = f"{shown(path)} has {schema.names.count(text_field)} columns named '{text_field}'."
        raise UserError(cause, "Rewrite the file with one: the others would be lost.")
    kind = schema.field(text_field).type
    if not _is_text(kind):
        raise UserError(f"Column '{text_field}' of {shown(path)} is {kind}, not text.", fix)
    return [text_field]


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
