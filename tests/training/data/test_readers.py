"""Chunks, file types and positions in error messages, with small chunks and blocks so that every boundary is reached."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.platform.errors import UserError
from strata.training.data import parquet, readers
from strata.training.data.left_out import LeftOut
from strata.training.data.readers import chunks, read_documents

PLAIN_CONTROLS = {7, 8, 9, 10, 11, 12, 13, 27}  # bell, backspace, tab, line ends, form feed, escape


def documents(path: Path, left_out: LeftOut | None = None, alone: bool = True) -> list[str]:
    return list(read_documents(path, "text", alone, left_out or LeftOut()))


def plain_chunks(text: str, size: int) -> list[str]:
    """Chunks of `size` to 2 x `size` characters: to the first line end in that range, else the rest, else to the last space."""
    found = []
    while text:
        window = text[size : 2 * size]
        if "\n" in window:
            end = size + window.index("\n") + 1
        elif len(text) < 2 * size:
            end = len(text)
        else:
            spaces = [at for at, character in enumerate(window) if character in " \t\r"]
            end = size + spaces[-1] + 1 if spaces else 2 * size
        found.append(text[:end])
        text = text[end:]
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("abc", ["abc"]),
        ("abcd" * 2, ["abcdabcd"]),  # 8 characters may be one chunk: none of them is a line end or a space
        ("abcdefg", ["abcdefg"]),
        ("abcdefghi", ["abcdefgh", "i"]),
        ("abc\nefgh", ["abc\nefgh"]),  # a line end before the range does not split
        ("abcd\nfgh", ["abcd\n", "fgh"]),
        ("abcdefg\nij", ["abcdefg\n", "ij"]),
        ("ab\nd\nf\nhij", ["ab\nd\n", "f\nhij"]),
        ("abcd fg ij", ["abcd fg ", "ij"]),  # the last space, but the first line end
        ("abcd\tfghij", ["abcd\t", "fghij"]),
        ("abcde\rghij", ["abcde\r", "ghij"]),
        ("abcd fg", ["abcd fg"]),
    ],
)
def test_chunks_end_at_line_ends_then_spaces(monkeypatch: pytest.MonkeyPatch, text: str, expected: list[str]) -> None:
    monkeypatch.setattr(readers, "CHUNK_CHARS", 4)
    assert list(chunks(text)) == expected == plain_chunks(text, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@settings(deadline=None, max_examples=50)
@given(text=st.text("ab \t\r\né語", max_size=60), size=st.integers(1, 7), block=st.integers(4, 9))
def test_file_read_in_blocks_has_the_chunks_of_its_text(folder: Path, text: str, size: int, block: int) -> None:
    path = folder / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_CHARS", size)
        patch.setattr(readers, "BLOCK", block)
        assert documents(path) == [chunk for chunk in plain_chunks(text, size) if chunk.strip()]


def test_chunks_have_32_thousand_characters(tmp_path: Path) -> None:
    text = "x" * 150_000
    (tmp_path / "a.txt").write_text(text)
    assert [len(chunk) for chunk in documents(tmp_path / "a.txt")] == [65_536, 65_536, 18_928]
    (tmp_path / "b.txt").write_text("x" * 32_767 + "\n" + "x\n" * 10)
    assert [len(chunk) for chunk in documents(tmp_path / "b.txt")] == [32_770, 18]


def test_blank_chunks_are_numbered_from_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CHUNK_CHARS", 2)
    for block in (4, 1 << 20):
        monkeypatch.setattr(readers, "BLOCK", block)
        for text, number in (("ab\ncd\n  \nef\n", 3), ("  \nab\ncd\n", 1), ("ab\ncd\nef\n  ", 4)):
            (tmp_path / "a.txt").write_text(text)
            left_out = LeftOut()
            documents(tmp_path / "a.txt", left_out)
            assert left_out.first_empty == f"part {number} of {tmp_path / 'a.txt'}"
            assert (left_out.read, left_out.empty, left_out.documents) == (1, 1, text.count("\n") - (number < 4))


@pytest.mark.parametrize("byte", range(33))
def test_control_characters_make_a_file_binary(tmp_path: Path, byte: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"text" + bytes([byte]) + b"text")
    if byte in {*PLAIN_CONTROLS, 32}:
        assert documents(path) == [f"text{chr(byte)}text"]
        return
    with pytest.raises(UserError, match="is not text, JSONL or Parquet: binary"):
        documents(path)
    left_out = LeftOut()
    assert documents(path, left_out, alone=False) == []
    assert left_out.files == {path: "binary"} and left_out.read == 0


@pytest.mark.parametrize(("at", "binary"), [(8190, True), (8191, True), (8192, False)])
def test_file_type_is_decided_by_the_first_8_kib(tmp_path: Path, at: int, binary: bool) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * at + b"\x01")
    left_out = LeftOut()
    documents(tmp_path / "a.txt", left_out, alone=False)
    assert bool(left_out.files) == binary


@pytest.mark.parametrize("block", [3, 5, 8, 1 << 20])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(
    ("content", "byte", "line", "message"),
    [
        (b"\xff", 0, 1, "is not UTF-8"),
        (b"ab\n\xe9", 3, 2, "is not UTF-8"),
        (b"one\ntwo\nth\xff\n", 10, 3, "is not UTF-8"),
        ("éé\n語\n".encode() + b"x\xc3", 10, 3, "is not UTF-8"),
        (b"one\ntwo\nthree\xc3\x28", 13, 3, "is not UTF-8"),
    ],
)
def test_undecodable_byte_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, mark: bytes, content: bytes, byte: int, line: int, message: str
) -> None:
    monkeypatch.setattr(readers, "BLOCK", block)
    (tmp_path / "a.txt").write_bytes(mark + content)
    at = rf"byte {byte + len(mark)} \(line {line}\) is 0x{content[byte]:02x}"
    with pytest.raises(UserError, match=rf"{message}: {at}"):
        documents(tmp_path / "a.txt")


@pytest.mark.parametrize("block", [4, 1 << 20])
@pytest.mark.parametrize(("content", "byte", "line"), [(b"\0", 0, 1), (b"ab\n\0c", 3, 2), (b"one\ntwo\n..\0..\n", 10, 3)])
def test_nul_byte_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, content: bytes, byte: int, line: int
) -> None:
    monkeypatch.setattr(readers, "BLOCK", block)
    monkeypatch.setattr(readers, "HEAD", 0)
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"is not text: byte {byte} \(line {line}\) is NUL"):
        documents(tmp_path / "a.txt")


def test_undecodable_line_of_jsonl_is_located(tmp_path: Path) -> None:
    lines = [b'{"text": "one"}\n', b'{"text": "two"}\n', b'{"text": "\xe9"}\n']
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"is not UTF-8: byte 42 \(line 3\) is 0xe9"):
        documents(tmp_path / "a.jsonl")


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".JSONL"])
def test_blank_lines_of_jsonl_are_ignored_and_blank_texts_counted(tmp_path: Path, suffix: str) -> None:
    path, left_out = tmp_path / f"a{suffix}", LeftOut()
    path.write_text('\n{"text": "one"}\n \n{"text": " "}\n{"text": null}\n{"text": "text"}\n')
    assert documents(path, left_out) == ["one", "text"]
    assert (left_out.documents, left_out.empty, left_out.first_empty) == (2, 2, f"line 4 of {path}")


@pytest.mark.parametrize("text", ["\ud7ff", "\ue000", "😀"])
def test_characters_next_to_the_surrogates_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert documents(tmp_path / "a.jsonl") == [text]


@pytest.mark.parametrize("escape", ["\\ud800", "\\udbff", "\\udc00", "\\udfff"])
def test_unpaired_surrogates_are_refused(tmp_path: Path, escape: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a{escape}b"}}\n')
    with pytest.raises(UserError, match="has an unpaired surrogate in 'text'"):
        documents(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("value", "kind"),
    [("true", "a boolean"), ("1", "a number"), ("1.5", "a number"), ("[]", "a list"), ("{}", "an object")],
)
def test_value_that_is_not_text_is_named(tmp_path: Path, value: str, kind: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": {value}}}\n')
    with pytest.raises(UserError, match=f"has no text in 'text': it is {kind}"):
        documents(tmp_path / "a.jsonl")


@pytest.mark.parametrize(("line", "kind"), [("null", "null"), ('"x"', "a string")])
def test_line_that_is_not_an_object_is_named(tmp_path: Path, line: str, kind: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    with pytest.raises(UserError, match=f"is not an object but {kind}"):
        documents(tmp_path / "a.jsonl")


def test_long_reasons_are_cut_to_200_characters() -> None:
    assert parquet._one_line(ValueError("one\n  two.")) == "one two"
    assert parquet._one_line(ValueError("x" * 300)) == "x" * 200


def test_parquet_rows_are_numbered_across_batches(tmp_path: Path) -> None:
    import pyarrow.parquet

    texts = [f"row {number}" for number in range(2500)]
    texts[2100] = ""
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    left_out = LeftOut()
    assert documents(tmp_path / "a.parquet", left_out) == [text for text in texts if text]
    assert left_out.first_empty == f"row 2,101 of {tmp_path / 'a.parquet'}"
