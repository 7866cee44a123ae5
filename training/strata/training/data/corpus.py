"""Text corpora: the Python standard library's source, the user's files, or a Hugging Face dataset.

A corpus is re-iterable rather than a list, so text larger than memory is streamed. A digest of its content identifies the
tokens made from it.
"""

import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError
from strata.platform.recipe import DataSection
from strata.training.data.digests import Files, unreadable
from strata.training.data.left_out import LeftOut, shown
from strata.training.data.readers import read_documents

# Tests are repetitive, and tables are data in .py files: a model of Python source learns nothing from either.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}


def _nothing() -> None:
    """`require_unchanged` of a source that cannot change while it is read."""


@dataclass(frozen=True)
class Corpus:
    """Documents of a corpus. `left_out` counts what the last complete pass over `documents` skipped; call `require_unchanged`
    after it."""

    name: str
    digest: str
    documents: Callable[[], Iterator[str]]
    left_out: LeftOut = field(default_factory=LeftOut)
    require_unchanged: Callable[[], None] = _nothing


def open_corpus(data: DataSection) -> Corpus:
    if data.sets or data.kind != "text":
        key = "data.sets" if data.sets else f"data.kind={data.kind}"
        raise UserError(f"{key} is for training a given model further.", "Set model.from to a model, or data.path to text.")
    if data.path:
        paths, others = files_at(data.path)
        return _of_files("data.path", paths, others, data.text_field)
    if data.hf:
        return _of_hub(data, data.hf)
    return _of_files("the Python standard library", stdlib_files(), {}, data.text_field)


def stdlib_files() -> list[Path]:
    """Source files of the standard library. Does not descend into excluded folders: installed packages in one of them can be a
    hundred thousand files."""
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = (name for name in subfolders if name not in STDLIB_LEFT_OUT)
        files += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    return sorted(files)


def files_at(root: Path, key: str = "data.path") -> tuple[list[Path], dict[Path, str]]:
    """Files in a folder and its subfolders except hidden ones, and other entries with the reason to skip them. `key` is the
    recipe's key with this path."""
    fix = f"Set {key} to a text, JSONL or Parquet file, or a folder of them."
    try:
        mode = root.stat().st_mode
    except FileNotFoundError:
        to = f" (a symbolic link to {shown(root.readlink())})" if root.is_symlink() else ""
        raise UserError(f"{key}={shown(root)} does not exist{to}.", fix) from None
    except OSError as error:
        raise unreadable(root, error) from None
    if stat.S_ISREG(mode):
        return [root], {}
    if not stat.S_ISDIR(mode):
        raise UserError(f"{key}={shown(root)} is neither a file nor a folder.", fix)
    files: list[Path] = []
    others: dict[Path, str] = {}
    _walk(root, (), files, others)
    return sorted(files), others


def _walk(folder: Path, above: tuple[tuple[int, int], ...], files: list[Path], others: dict[Path, str]) -> None:
    """Collects files and other entries. Follows symbolic links to folders, except to a parent of the link."""
    try:
        here = folder.stat()
        entries = list(os.scandir(folder))
    except OSError as error:
        raise unreadable(folder, error) from None
    within = (*above, (here.st_dev, here.st_ino))
    for entry in entries:
        path = folder / entry.name
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            files.append(path)
        elif not entry.is_dir():
            others[path] = "a broken symbolic link" if entry.is_symlink() else "not a file"
        elif (path.stat().st_dev, path.stat().st_ino) in within:
            others[path] = "a symbolic link to a parent folder"
        else:
            _walk(path, within, files, others)


def _of_files(name: str, paths: list[Path], others: dict[Path, str], text_field: str) -> Corpus:
    files, left_out = Files(paths), LeftOut()

    def documents() -> Iterator[str]:
        left_out.clear()
        left_out.files.update(others)
        for path in paths:
            yield from read_documents(path, text_field, alone=len(paths) == 1, left_out=left_out)

    return Corpus(name, files.digest(text_field), documents, left_out, files.require_unchanged)


def load_hub(dataset: str, config: str | None, split: str, key: str = "data") -> Any:
    """Dataset of the Hugging Face hub. `key` is the recipe's section with its id."""
    import datasets

    try:
        return datasets.load_dataset(dataset, config, split=split)
    except Exception as error:  # the hub client raises a dozen unrelated types for "not found" and "no network"
        reason = " ".join(str(error).split())[:200]
        fix = f"Check the id, {key}.hf_config, {key}.hf_split and the network."
        raise UserError(f"{key}.hf={dataset} cannot be loaded: {reason}", fix) from None


def _of_hub(data: DataSection, dataset: str) -> Corpus:
    rows = load_hub(dataset, data.hf_config, data.hf_split)
    if data.text_field not in rows.column_names:
        fields = ", ".join(rows.column_names)
        raise UserError(f"{dataset} has no field '{data.text_field}'.", f"Set data.text_field to one of: {fields}.")
    kind = rows.features[data.text_field]
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        texts = [name for name, feature in rows.features.items() if getattr(feature, "dtype", None) in ("string", "large_string")]
        fix = f"Set data.text_field to one of: {', '.join(texts)}." if texts else "Choose a dataset with a text field."
        raise UserError(f"Field '{data.text_field}' of {dataset} is {kind}, not text.", fix)
    left_out = LeftOut()

    def documents() -> Iterator[str]:
        left_out.clear()
        for number, row in enumerate(rows.select_columns(data.text_field), 1):
            if text := left_out.nonblank(row[data.text_field], "row", number, dataset):
                yield text

    return Corpus(dataset, f"{rows._fingerprint}-{data.text_field}", documents, left_out)
