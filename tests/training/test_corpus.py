import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from strata.platform.errors import UserError
from strata.platform.recipe import DataSection
from strata.training.corpus import open_corpus, stdlib_files
from strata.training.readers import PIECE


def documents(path: Path, **fields: str) -> list[str]:
    return list(open_corpus(DataSection(path=path, **fields)).documents())  # type: ignore[arg-type]


def test_default_is_the_standard_library_without_tests_and_tables() -> None:
    files = stdlib_files()
    names = {path.name for path in files}
    assert {"argparse.py", "ast.py"} <= names
    assert files == sorted(files)
    assert not any({"test", "encodings", "site-packages", "pydoc_data"} & set(path.parts[-3:-1]) for path in files)
    assert not any(name.startswith("_sysconfigdata") for name in names)


def test_folder_mixes_formats_and_passes_over_binaries(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain text")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "from json"}) + "\n\n" + json.dumps({"text": "too"}) + "\n")
    (tmp_path / "deep").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["from parquet", None]}), tmp_path / "deep" / "c.parquet")
    (tmp_path / "d.png").write_bytes(b"\x89PNG\0\0\xff\xfe")
    (tmp_path / ".hidden").write_text("not this")
    assert documents(tmp_path) == ["plain text", "from json", "too", "from parquet"]


def test_long_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))
    (tmp_path / "long.txt").write_text(text)
    pieces = documents(tmp_path / "long.txt")
    assert len(pieces) > 1 and "".join(pieces) == text
    assert all(piece.endswith("\n") and len(piece) < 2 * PIECE for piece in pieces)


def test_digest_follows_content(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    before = open_corpus(DataSection(path=tmp_path)).digest
    assert open_corpus(DataSection(path=tmp_path)).digest == before
    (tmp_path / "a.txt").write_text("two")
    assert open_corpus(DataSection(path=tmp_path)).digest != before


def test_missing_path_names_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.path=.*nowhere does not exist"):
        documents(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": ', "Line 2 of .* is not JSON"),
        ("a.jsonl", b'{"body": "other field"}\n', "no text in 'text' .it has: body"),
        ("a.parquet", b"PAR?", "is not Parquet"),
        ("a.bin", b"\xff\xfe\0\0", "is not UTF-8 text"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        documents(tmp_path / name)


def test_parquet_without_the_column_lists_those_it_has(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="one of: body"):
        documents(tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet", text_field="body") == ["x"]


def test_hub_out_of_reach_names_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"data.hf=someone/something cannot be loaded: no route"):
        open_corpus(DataSection(hf="someone/something"))
