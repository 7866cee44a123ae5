"""Inputs of the sets: files of a path, glob or URI, and rows of Hugging Face datasets.

An input is rendered and cached as a whole. A dataset is one input for every 10,000 rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError, shown
from strata.platform.recipe import DataKind, DataSection, DataSetSection
from strata.training.data.corpus import files_at, load_hub, stdlib_files
from strata.training.data.digests import Files
from strata.training.data.finetuning.downloads import download
from strata.training.data.finetuning.examples import Example, Place, parse, text_example
from strata.training.data.left_out import LeftOut
from strata.training.data.left_out import shown as shown_path
from strata.training.data.parquet import without_nulls
from strata.training.data.readers import read_numbered, read_rows, unit_of

DATASET_ROWS = 10_000
SAVED = ("dataset_dict.json", "state.json")  # files that `save_to_disk` of a DatasetDict and of a Dataset writes


@dataclass(frozen=True)
class Input:
    """Source of examples. `digest` identifies its content; `files` are those that must not change while it is read. A dataset
    has `rows`, the first of which is row number `first`."""

    name: str
    kind: DataKind
    text_field: str
    digest: str
    files: Files
    alone: bool = True
    rows: Any = None
    first: int = 1

    @property
    def size(self) -> int:
        """Bytes of a file, or rows of a dataset, as a rough measure of work."""
        return self.files.size if self.rows is None else len(self.rows) * 1000


@dataclass(frozen=True)
class InputSet:
    """Inputs of a set in a fixed order, and entries of its folder that are no files."""

    title: str
    kind: DataKind
    inputs: tuple[Input, ...]
    others: dict[Path, str] = field(default_factory=dict)


def open_sets(data: DataSection) -> list[InputSet]:
    """Sets of a recipe. Without any, the standard library's source is the only one."""
    if not data.all_sets:
        files = stdlib_files()
        inputs = [_file(path, "text", data.text_field, alone=False) for path in files]
        return [InputSet("the Python standard library", "text", tuple(inputs))]
    keys = [f"data.sets.{number}" for number in range(len(data.sets))] or ["data"]
    return [_open(one, key) for one, key in zip(data.all_sets, keys, strict=True)]


def _open(one: DataSetSection, key: str) -> InputSet:
    if one.hf:
        rows = load_hub(one.hf, one.hf_config, one.hf_split, key)
        return InputSet(one.title, one.kind, _dataset(rows, one, one.hf, f"{rows._fingerprint}", Files([]), key))
    others: dict[Path, str] = {}
    if one.uri:
        paths, alone = download(one.uri, key)
    else:
        assert one.path is not None
        if (one.path / SAVED[0]).is_file() or (one.path / SAVED[1]).is_file():
            return InputSet(one.title, one.kind, _saved(one.path, one, key))
        paths, alone, others = _local(one.path, key)
    inputs = tuple(_file(path, one.kind, one.text_field, alone) for path in paths)
    if not inputs:
        raise UserError(f"{key}.{'uri' if one.uri else 'path'}={shown(one.uri or one.path, 200)} has no files.", "Correct it.")
    return InputSet(one.title, one.kind, inputs, others)


def _local(path: Path, key: str) -> tuple[list[Path], bool, dict[Path, str]]:
    """Files of a path, whether the user named the file itself, and entries that are no files."""
    if path.exists() or not any(character in str(path) for character in "*?["):
        files, others = files_at(path, f"{key}.path")
        return files, path.is_file(), others
    pattern = str(path.relative_to(path.anchor))
    matches = sorted(match for match in Path(path.anchor).glob(pattern) if not match.name.startswith("."))
    if not matches:
        raise UserError(f"{key}.path={shown_path(path)} matches no file.", "Correct the pattern.")
    found = [files_at(match, f"{key}.path") for match in matches]
    files = sorted({file for files, _ in found for file in files})
    return files, False, {other: reason for _, others in found for other, reason in others.items()}


def _file(path: Path, kind: DataKind, text_field: str, alone: bool) -> Input:
    path = path.absolute()  # a worker may run in another folder
    files = Files([path])
    return Input(shown_path(path), kind, text_field, files.digest(), files, alone)


def _saved(folder: Path, one: DataSetSection, key: str) -> tuple[Input, ...]:
    import datasets

    files = Files(sorted(path for path in folder.absolute().rglob("*") if path.is_file()))
    digest = files.digest()
    try:
        rows = datasets.load_from_disk(str(folder))
    except Exception as error:  # damage shows as many unrelated types
        cause = f"{key}.path={shown_path(folder)} is a saved dataset that cannot be loaded: {shown(error, 200)}"
        raise UserError(cause, "Save it again with save_to_disk.") from None
    if isinstance(rows, datasets.DatasetDict):
        if one.hf_split not in rows:
            has = ", ".join(rows)
            raise UserError(f"{shown_path(folder)} has no split '{one.hf_split}'.", f"Set {key}.hf_split to one of: {has}.")
        rows, digest = rows[one.hf_split], f"{digest}-{one.hf_split}"
    return _dataset(rows, one, shown_path(folder), digest, files, key)


def _dataset(rows: Any, one: DataSetSection, name: str, digest: str, files: Files, key: str) -> tuple[Input, ...]:
    if one.kind == "text" and one.text_field not in rows.column_names:
        has = ", ".join(rows.column_names)
        raise UserError(f"{name} has no field '{one.text_field}'.", f"Set {key}.text_field to one of: {has}.")
    inputs = []
    for begin in range(0, len(rows), DATASET_ROWS):
        end = min(begin + DATASET_ROWS, len(rows))
        part = rows.select(range(begin, end))
        inputs.append(Input(name, one.kind, one.text_field, f"{digest}-{begin}-{end}", files, rows=part, first=begin + 1))
    return tuple(inputs)


def unit(source: Input) -> str:
    """Unit in which the examples of an input are counted: line, row or part."""
    return "row" if source.rows is not None else unit_of(source.files.paths[0])


def read_examples(source: Input, left_out: LeftOut) -> Iterator[Example]:
    """Examples of an input. Rows without text are left out of a set of text; in other sets they are errors."""
    counted = unit(source)
    if source.kind == "text":
        for number, text in _texts(source, left_out):
            yield text_example(text, Place(source.name, counted, number))
    else:
        for number, row in _rows(source, left_out):
            yield parse(row, source.kind, Place(source.name, counted, number))
    source.files.require_unchanged()


def _texts(source: Input, left_out: LeftOut) -> Iterator[tuple[int, str]]:
    if source.rows is None:
        yield from read_numbered(source.files.paths[0], source.text_field, source.alone, left_out)
        return
    for number, row in enumerate(source.rows.select_columns(source.text_field), source.first):
        text = row[source.text_field]
        if text is not None and not isinstance(text, str):
            cause = f"Row {number:,} of {source.name} has no text in '{source.text_field}': it is {type(text).__name__}."
            raise UserError(cause, "Set text_field to a text field.")
        if text := left_out.nonblank(text, "row", number, source.name):
            yield number, text


def _rows(source: Input, left_out: LeftOut) -> Iterator[tuple[int, dict[str, Any]]]:
    if source.rows is None:
        yield from read_rows(source.files.paths[0], source.alone, left_out)
        return
    for number, row in enumerate(source.rows, source.first):
        left_out.documents += 1
        yield number, without_nulls(row)
