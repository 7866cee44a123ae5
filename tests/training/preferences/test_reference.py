"""Cache of reference log-probabilities: continuation after a kill, several writers, damage, wrong input."""

from pathlib import Path

import numpy as np
import pytest

from strata.platform.errors import UserError
from strata.training.preferences.reference import SUFFIX, ReferenceCache, cache_key

KEY = cache_key("rows", "weights", 256, "fp32")


def cache(folder: Path, documents: int = 6) -> ReferenceCache:
    return ReferenceCache(folder, KEY, documents)


def parts(folder: Path) -> list[Path]:
    return sorted((folder / KEY).glob(f"*{SUFFIX}"))


def test_everything_in_the_key_changes_it() -> None:
    keys = {
        cache_key("rows", "weights", 256, "fp32"),
        cache_key("row", "sweights", 256, "fp32"),
        cache_key("other", "weights", 256, "fp32"),
        cache_key("rows", "other", 256, "fp32"),
        cache_key("rows", "weights", 512, "fp32"),
        cache_key("rows", "weights", 256, "bf16"),
    }
    assert len(keys) == 6
    assert cache_key("rows", "weights", 256, "fp32") in keys


def test_rows_are_read_in_the_order_asked(tmp_path: Path) -> None:
    mine = cache(tmp_path)
    assert mine.missing().tolist() == [0, 1, 2, 3, 4, 5]
    mine.put([4, 1], [-4.5, -1.25])
    mine.put(np.array([0]), np.array([-0.1]))
    assert mine.missing().tolist() == [2, 3, 5]
    assert mine.read([1, 4, 1]).tolist() == [-1.25, -4.5, -1.25]
    assert mine.read([0]).dtype == np.float32 and mine.read([0])[0] == np.float32(-0.1)
    assert mine.read([]).tolist() == []


def test_another_process_continues(tmp_path: Path) -> None:
    cache(tmp_path).put([0, 3], [-1, -2])
    later = cache(tmp_path)
    assert later.missing().tolist() == [1, 2, 4, 5]
    assert later.read([3, 0]).tolist() == [-2, -1]
    later.put(later.missing(), [-5.0] * 4)
    assert later.missing().size == 0 and cache(tmp_path).missing().size == 0


def test_writers_see_each_other(tmp_path: Path) -> None:
    one, other = cache(tmp_path), cache(tmp_path)
    one.put([0, 1, 2], [-1, -2, -3])
    other.put([3, 4, 5], [-4, -5, -6])
    assert one.read([5, 0]).tolist() == [-6, -1]
    assert other.missing().size == 0


def test_other_keys_are_other_caches(tmp_path: Path) -> None:
    cache(tmp_path).put([0], [-1])
    assert ReferenceCache(tmp_path, cache_key("rows", "weights", 512, "fp32"), 6).missing().size == 6


def test_rows_written_twice_are_the_same_for_all_readers(tmp_path: Path) -> None:
    """Readers that saw the parts in different orders."""
    early = cache(tmp_path)
    for value in (-1.0, -2.0, -3.0, -4.0):
        early.put([2], [value])
        early.missing()
    assert len(parts(tmp_path)) == 4
    assert cache(tmp_path).read([2])[0] == early.read([2])[0]


def test_an_unfinished_write_is_ignored(tmp_path: Path) -> None:
    mine = cache(tmp_path)
    mine.put([0], [-1])
    [whole] = parts(tmp_path)
    (tmp_path / KEY / f".{whole.name}.x1y2z3").write_bytes(whole.read_bytes()[:5])
    assert cache(tmp_path).missing().tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("damage", ["bit", "truncated", "longer", "empty"])
def test_damaged_parts_are_computed_again(tmp_path: Path, damage: str) -> None:
    mine = cache(tmp_path)
    mine.put([0, 1], [-1, -2])
    [part] = parts(tmp_path)
    mine.put([2], [-3])
    content = bytearray(part.read_bytes())
    if damage == "bit":
        content[9] ^= 1
    changed = {"bit": bytes(content), "truncated": content[:12], "longer": content + content[:12], "empty": b""}[damage]
    part.write_bytes(changed)
    later = cache(tmp_path)
    assert later.missing().tolist() == [0, 1, 3, 4, 5]
    assert not part.exists() and later.read([2]).tolist() == [-3]
    later.put([0, 1], [-1, -2])  # the same content, under the same name
    assert part.exists()
    assert later.missing().tolist() == [3, 4, 5] and later.read([0, 1, 2]).tolist() == [-1, -2, -3]


def test_a_part_that_another_process_deletes_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = cache(tmp_path)
    mine.put([0], [-1])
    read = Path.read_bytes

    def deleted(path: Path) -> bytes:
        path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", deleted)
    assert mine.missing().tolist() == [0, 1, 2, 3, 4, 5]


def test_missing_rows_cannot_be_read(tmp_path: Path) -> None:
    mine = cache(tmp_path)
    mine.put([0], [-1])
    with pytest.raises(ValueError, match="row 4 has not been computed: 2 of these are missing"):
        mine.read([0, 4, 5])


@pytest.mark.parametrize(
    ("rows", "values", "message"),
    [
        ([6], [-1], "row 6 is not one of the 6 documents"),
        ([-1], [-1], "row -1 is not one of"),
        ([0, 1], [-1], r"one value for each row, got \[2\] rows and \[1\] values"),
        ([[0, 1]], [[-1, -2]], "one value for each row"),
        ([1, 1], [-1, -2], "a row occurs more than once"),
    ],
)
def test_wrong_rows_are_refused(tmp_path: Path, rows: list[int], values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cache(tmp_path).put(rows, values)
    assert parts(tmp_path) == []


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -1e39])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(UserError, match="log-probability of row 3 is not a finite number"):
        cache(tmp_path).put([2, 3], [-1, value])
    assert parts(tmp_path) == []


def test_rows_beyond_the_documents_are_not_read(tmp_path: Path) -> None:
    cache(tmp_path).put([5], [-1])
    with pytest.raises(ValueError, match="row 5 is not one of the 5 documents"):
        cache(tmp_path, 5).missing()
    assert parts(tmp_path) != []
    for row in (5, -1):
        with pytest.raises(ValueError, match=f"row {row} is not one of"):
            cache(tmp_path, 5).read([row])


def test_no_rows_write_nothing(tmp_path: Path) -> None:
    cache(tmp_path).put([], [])
    assert not (tmp_path / KEY).exists()
    assert cache(tmp_path, 0).missing().tolist() == []
