"""Where the text comes from: the Python standard library on this machine, files of the user's, or a Hugging Face dataset.

A corpus is re-iterable rather than a list, so that text larger than memory is streamed, and carries a digest of its content,
so that tokens made from it can be found again.
"""

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from strata.platform.errors import UserError
from strata.platform.recipe import DataSection
from strata.training.readers import read_documents

# Tests repeat themselves, and tables are data with a .py ending: a model of Python source learns nothing from either.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}


@dataclass(frozen=True)
class Corpus:
    name: str
    digest: str
    documents: Callable[[], Iterator[str]]


def open_corpus(data: DataSection) -> Corpus:
    if data.path:
        return _of_files("data.path", _files_at(data.path), data.text_field)
    if data.hf:
        return _of_hub(data, data.hf)
    return _of_files("the Python standard library", stdlib_files(), data.text_field)


def stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if not path.name.startswith("_sysconfigdata"))
    return sorted(path for path in files if not STDLIB_LEFT_OUT.intersection(path.relative_to(root).parts))


def _files_at(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"data.path={path} does not exist.", "Give a text, JSONL or Parquet file, or a folder of them.")
    if path.is_file():
        return [path]
    files = (p for p in path.rglob("*") if p.is_file())
    return sorted(p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts))


def _of_files(name: str, files: list[Path], text_field: str) -> Corpus:
    digest = hashlib.blake2b(text_field.encode(), digest_size=16)
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())

    def documents() -> Iterator[str]:
        for path in files:
            yield from read_documents(path, text_field, alone=len(files) == 1)

    return Corpus(name, digest.hexdigest(), documents)


def _of_hub(data: DataSection, dataset: str) -> Corpus:
    import datasets

    try:
        rows = datasets.load_dataset(dataset, data.hf_config, split=data.hf_split)
    except Exception as error:  # the hub client raises a dozen unrelated types for "not there" and "no network"
        reason = " ".join(str(error).split())[:200]
        fix = "Check the id, data.hf_config, data.hf_split and the network."
        raise UserError(f"data.hf={dataset} cannot be loaded: {reason}", fix) from None
    if data.text_field not in rows.column_names:
        fields = ", ".join(rows.column_names)
        raise UserError(f"{dataset} has no field '{data.text_field}'.", f"Set data.text_field to one of: {fields}.")

    def documents() -> Iterator[str]:
        yield from (row[data.text_field] for row in rows.select_columns(data.text_field))

    return Corpus(dataset, f"{rows._fingerprint}-{data.text_field}", documents)
