from pathlib import Path

import pytest

from strata.training.data.left_out import LeftOut


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (1, "1 of 4 files left out: 0.bin (binary)."),
        (5, "5 of 8 files left out: 0.bin (binary), 1.bin (binary), 2.bin (binary), 3.bin (binary), 4.bin (binary)."),
        (
            6,
            "6 of 9 files left out: 0.bin (binary), 1.bin (binary), 2.bin (binary), 3.bin (binary), 4.bin (binary) and 1 more.",
        ),
        (
            1007,
            "1,007 of 1,010 files left out: 0.bin (binary), 1.bin (binary), 2.bin (binary), 3.bin (binary), 4.bin (binary)"
            " and 1,002 more.",
        ),
    ],
)
def test_five_files_are_named_and_the_rest_counted(files: int, line: str) -> None:
    left_out = LeftOut(read=3, files={Path(f"/corpus/{number}.bin"): "binary" for number in range(files)})
    assert left_out.lines() == [line]


def test_blank_documents_are_counted_and_the_first_is_named() -> None:
    left_out = LeftOut()
    found = [left_out.nonblank(text, "row", number, "a.jsonl") for number, text in enumerate(["x", " \n", None, "", "y z"], 1233)]
    assert found == ["x", None, None, None, "y z"]
    assert left_out.lines() == ["3 of 5 documents left out: null or blank, the first at row 1,234 of a.jsonl."]


def test_nothing_left_out_has_no_line() -> None:
    left_out = LeftOut(read=2)
    assert left_out.nonblank("x", "row", 1, "a.jsonl") == "x"
    assert left_out.lines() == []


def test_clear_resets_every_count() -> None:
    left_out = LeftOut(read=2, files={Path("a"): "binary"})
    left_out.nonblank("x", "row", 1, "a.jsonl"), left_out.nonblank("", "row", 2, "a.jsonl")
    left_out.clear()
    assert left_out == LeftOut() == LeftOut(0, {}, 0, 0, "")
    left_out.nonblank("", "row", 7, "b.jsonl")
    assert left_out.lines() == ["1 of 1 documents left out: null or blank, the first at row 7 of b.jsonl."]
