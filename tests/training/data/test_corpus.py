import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from strata.platform.errors import UserError
from strata.platform.recipe import DataSection
from strata.training.data import digests
from strata.training.data.corpus import Corpus, open_corpus, stdlib_files
from strata.training.data.readers import CHUNK_CHARS


@pytest.fixture(autouse=True)
def cache(home: Path) -> Path:
    """Each test has its own digest cache."""
    return home


def opened(path: Path, **fields: str) -> Corpus:
    return open_corpus(DataSection(path=path, **fields))  # type: ignore[arg-type]


def documents(path: Path, **fields: str) -> list[str]:
    return list(opened(path, **fields).documents())


def left_out(path: Path) -> list[str]:
    corpus = opened(path)
    list(corpus.documents())
    return corpus.left_out.lines()


def write_parquet(path: Path, column: Any, **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, **options)
    return path


def test_default_is_the_standard_library_without_tests_and_tables() -> None:
    files = stdlib_files()
    names = {path.name for path in files}
    assert {"argparse.py", "ast.py"} <= names
    assert files == sorted(files)
    assert not any({"test", "encodings", "site-packages", "pydoc_data"} & set(path.parts[-3:-1]) for path in files)
    assert not any(name.startswith("_sysconfigdata") for name in names)


def test_folder_mixes_formats_and_skips_binaries(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain text")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "from json"}) + "\n\n" + json.dumps({"text": "too"}) + "\n")
    (tmp_path / "deep").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["from parquet", None]}), tmp_path / "deep" / "c.parquet")
    (tmp_path / "d.png").write_bytes(b"\x89PNG\0\0\xff\xfe")
    (tmp_path / ".hidden").write_text("not this")
    assert documents(tmp_path) == ["plain text", "from json", "too", "from parquet"]


def test_long_text_is_split_at_line_ends_without_loss(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))
    (tmp_path / "long.txt").write_text(text)
    chunks = documents(tmp_path / "long.txt")
    assert len(chunks) > 1 and "".join(chunks) == text
    assert all(chunk.endswith("\n") and len(chunk) < 2 * CHUNK_CHARS for chunk in chunks)


def test_digest_depends_on_content(tmp_path: Path) -> None:
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
        ("a.jsonl", b'["fine"]\n', "Line 1 of .* is not an object but a list"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": 5}\n', "Line 2 of .* has no text in 'text': it is a number"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": ["x"]}\n', "Line 2 of .* it is a list"),
        ("a.jsonl", b'{"text": "one", "text": "two"}\n', "Line 1 of .* has 'text' more than once"),
        ("a.jsonl", b'{"text": "half \\ud83d"}\n', "Line 1 of .* an unpaired surrogate"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "caf\xe9"}\n', r"is not UTF-8: byte 30 \(line 2\) is 0xe9"),
        ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}\n", "Line 1 of .* is not JSON"),
        ("a.jsonl", b"[" * 100_000, "Line 1 of .* is not JSON"),
        ("a.jsonl", b"\x1f\x8b\x08\0", "compressed with gzip"),
        ("a.jsonl", "{}".encode("utf-16"), "is UTF-16, not UTF-8"),
        ("a.txt", "text".encode("utf-16"), "is UTF-16, not UTF-8"),
        ("a.txt", "text".encode("utf-32"), "is UTF-32, not UTF-8"),
        ("a.txt", "text".encode("utf-16-le"), "is not text, JSONL or Parquet: binary"),
        ("a.txt", b"caf\xe9", r"is not UTF-8: byte 3 \(line 1\) is 0xe9"),
        ("a.txt", b"fine\n" * 4000 + b"caf\xe9\n", r"is not UTF-8: byte 20,003 \(line 4,001\) is 0xe9"),
        ("a.txt", b"fine\n" * 400_000 + b"\xc3", r"is not UTF-8: byte 2,000,000 \(line 400,001\) is 0xc3"),
        ("a.txt", b"fine\n" * 4000 + b"\0", r"is not text: byte 20,000 \(line 4,001\) is NUL"),
        ("a.txt.gz", b"\x1f\x8b\x08\0", "compressed with gzip"),
        ("a.txt.zst", b"\x28\xb5\x2f\xfd", "compressed with Zstandard"),
        ("a.dat", b"PAR1....", "Parquet without the suffix .parquet"),
        ("a.bin", b"\x7fELF\0\0", "is not text, JSONL or Parquet: binary"),
        ("a.parquet", b"", "is not Parquet"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        documents(tmp_path / name)
    assert name in raised.value.cause and raised.value.fix


def test_text_of_another_encoding_is_refused_in_a_folder_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes("déjà vu".encode("latin1"))
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8.*\n.*iconv"):
        documents(tmp_path)


def test_text_is_read_byte_for_byte(tmp_path: Path) -> None:
    """Includes line ends of any kind and a character across the end of the sniffed head; removes the byte order mark."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n\x0cfour\xe2\x80\xa8")
    assert documents(tmp_path / "a.txt") == ["one\r\ntwo\rthree\n\x0cfour\u2028"]
    one_line = "語" * 3000
    (tmp_path / "b.txt").write_text("." + one_line)
    assert documents(tmp_path / "b.txt") == ["." + one_line]
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one\\r\\ntwo"}\r\n{"text":\r "three"}\n')
    assert documents(tmp_path / "c.jsonl") == ["one\r\ntwo", "three"]


@pytest.mark.parametrize("text", ["word " * 200_000, "語" * 300_000, "x\r" * 200_000])
def test_long_line_is_split_without_loss(tmp_path: Path, text: str) -> None:
    (tmp_path / "long.txt").write_bytes(text.encode())
    chunks = documents(tmp_path / "long.txt")
    assert len(chunks) > 3 and "".join(chunks) == text
    assert all(len(chunk) <= 2 * CHUNK_CHARS for chunk in chunks)


def test_skipped_files_and_rows_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\0\0\xff\xfe")
    (tmp_path / "c.jsonl.gz").write_bytes(b"\x1f\x8b\x08\0")
    (tmp_path / "d.txt").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "e.pipe")
    (tmp_path / "f.jsonl").write_text('{"text": "fine"}\n{"text": null}\n{"text": " "}\n')
    write_parquet(tmp_path / "g.parquet", ["fine", None, ""])
    files, rows = left_out(tmp_path)
    assert files.startswith("4 of 7 files left out: ")
    for name in ("b.png (binary)", "c.jsonl.gz (compressed with gzip", "d.txt (a broken symbolic link)", "e.pipe (not a file)"):
        assert name in files
    assert rows == f"4 of 7 documents left out: null or blank, the first at line 2 of {tmp_path / 'f.jsonl'}."


def test_linked_folders_are_read_once_and_loops_are_named(tmp_path: Path) -> None:
    elsewhere, corpus = tmp_path / "elsewhere", tmp_path / "corpus"
    for folder in (elsewhere, corpus):
        folder.mkdir()
        (folder / f"{folder.name}.txt").write_text(folder.name)
    (corpus / "more").symlink_to(elsewhere)
    (corpus / "loop").symlink_to(corpus)
    assert sorted(documents(corpus)) == ["corpus", "elsewhere"]
    assert left_out(corpus) == ["1 of 3 files left out: loop (a symbolic link to a parent folder)."]


def test_broken_link_and_pipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"does not exist .a symbolic link to .*gone"):
        documents(tmp_path / "link")
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    with pytest.raises(UserError, match=r"ring cannot be read: Too many levels of symbolic links"):
        documents(tmp_path / "ring")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        documents(tmp_path / "pipe")


@pytest.mark.parametrize("what", ["file", "folder", "data.path"])
def test_path_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("fine")

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # permissions do not apply to root
    monkeypatch.setattr(*{"file": (Path, "open"), "folder": (os, "scandir"), "data.path": (Path, "stat")}[what], forbidden)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        documents(tmp_path)


def test_file_name_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("fine")
    (tmp_path / os.fsdecode(b"caf\xe9.png")).write_bytes(b"\0")
    assert documents(tmp_path) == ["fine"]
    assert "caf\ufffd.png" in left_out(tmp_path)[0]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ([1, 2], "int64"),
        ([b"x"], "binary"),
        ([None], "null"),
        ([["x"]], "list<"),
        ([{"x": "y"}], "struct<"),
        ([1.5], "double"),
        ([True], "bool"),
    ],
)
def test_parquet_column_that_is_not_text_is_refused(tmp_path: Path, column: list[Any], kind: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", column)
    with pytest.raises(UserError, match=rf"Column 'text' of .*a.parquet is {kind}.*, not text"):
        documents(path)


def test_parquet_text_of_any_arrow_type_is_read(tmp_path: Path) -> None:
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        assert documents(write_parquet(tmp_path / "a.PARQUET", pyarrow.array(["one", "two"]).cast(kind))) == ["one", "two"]


def test_parquet_with_a_duplicate_column_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has 2 columns named 'text'"):
        documents(tmp_path / "a.parquet")


def test_parquet_text_that_is_not_utf8_names_the_row(tmp_path: Path) -> None:
    binary = pyarrow.array([b"fine", b"caf\xe9"])
    path = write_parquet(tmp_path / "a.parquet", pyarrow.StringArray.from_buffers(2, *binary.buffers()[1:]))
    with pytest.raises(UserError, match=r"Row 2 of .*a.parquet is not UTF-8"):
        documents(path)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_damaged_parquet_is_refused_wherever_it_is_damaged(tmp_path: Path, compression: str) -> None:
    """Every damage raises an error that names the file, or has no effect: the pages have checksums."""
    rows = [f"row {number} " * 20 for number in range(400)]
    path = write_parquet(tmp_path / "a.parquet", rows, compression=compression, write_page_checksum=True, use_dictionary=False)
    whole = path.read_bytes()
    refused = 0
    for at in range(4, len(whole), len(whole) // 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            assert documents(path) == rows
        except UserError as error:
            refused += "a.parquet" in error.cause
    assert refused > 40
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"a\.parquet is not Parquet"):
            documents(path)


def test_file_that_changes_during_the_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    corpus = opened(tmp_path)
    corpus.require_unchanged()
    with (tmp_path / "a.txt").open("a") as file:
        file.write(" and more")
    with pytest.raises(UserError, match=r"a\.txt changed while it was being read"):
        corpus.require_unchanged()
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt cannot be read"):
        corpus.require_unchanged()


def test_unchanged_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    read: list[Path] = []
    content = digests._content
    monkeypatch.setattr(digests, "_content", lambda path: read.append(path) or content(path))
    fresh = opened(path).digest
    assert opened(path).digest == fresh and len(read) == 2  # just written: a change within the same clock tick would go unnoticed
    monkeypatch.setattr(digests, "SETTLED_S", -1.0)
    assert opened(path).digest == opened(path).digest == fresh and len(read) == 3
    seen = path.stat()
    path.write_text("two")  # same size, with the modification time set back
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert opened(path).digest != fresh and len(read) == 4


def test_parquet_without_the_column_lists_its_columns(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"has no column 'text'.*\n.*one of: body"):
        documents(tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet", text_field="body") == ["x"]


def test_unreachable_hub_names_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"data.hf=someone/something cannot be loaded: no route"):
        open_corpus(DataSection(hf="someone/something"))


def test_hub_field_that_is_not_text_is_refused_and_nulls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one", None, " ", "two"], "label": [1, 2, 3, 4]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    corpus = open_corpus(DataSection(hf="someone/something"))
    assert list(corpus.documents()) == ["one", "two"]
    assert corpus.left_out.lines() == ["2 of 4 documents left out: null or blank, the first at row 2 of someone/something."]
    with pytest.raises(UserError, match=r"Field 'label' of someone/something is .*int64.*, not text\.\n.*one of: text\."):
        open_corpus(DataSection(hf="someone/something", text_field="label"))
