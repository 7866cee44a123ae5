import shutil
from pathlib import Path

import pytest

from strata.platform.errors import UserError
from strata.training import checkpoint
from strata.training.checkpoint import Damaged, Origin, newest, verify, write_manifest

ORIGIN = Origin(model={"layers": 2}, tokens="abc", workers=2, zero=1)


def write(checkpoints: Path, step: int) -> Path:
    """As two ranks would: each its own part and manifest, put together in one folder."""
    target = checkpoints / f"step-{step:08}"
    for rank in range(ORIGIN.workers):
        part = checkpoints / f"part-{rank}"
        (part / checkpoint.ENGINE).mkdir(parents=True)
        (part / checkpoint.ENGINE / f"rank-{rank}.pt").write_bytes(bytes([step, rank]) * 5000)
        write_manifest(part, rank, step, ORIGIN)
        shutil.copytree(part, target, dirs_exist_ok=True)
        shutil.rmtree(part)
    return target


def said_nothing(message: str) -> None:
    raise AssertionError(message)


def test_whole_checkpoint_is_found(tmp_path: Path) -> None:
    write(tmp_path, 4), write(tmp_path, 12)
    found = newest(tmp_path, said_nothing)
    assert found == checkpoint.Checkpoint(tmp_path / "step-00000012", 12, ORIGIN)


def test_none_is_no_error(tmp_path: Path) -> None:
    assert newest(tmp_path / "not there", said_nothing) is None


def truncate(folder: Path) -> None:
    path = folder / checkpoint.ENGINE / "rank-1.pt"
    path.write_bytes(path.read_bytes()[:100])


def flip_a_byte(folder: Path) -> None:
    path = folder / checkpoint.ENGINE / "rank-0.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def lose_a_file(folder: Path) -> None:
    (folder / checkpoint.ENGINE / "rank-0.pt").unlink()


def lose_a_rank(folder: Path) -> None:
    (folder / "manifest-00001.json").unlink()


def cut_a_manifest(folder: Path) -> None:
    path = folder / "manifest-00000.json"
    path.write_text(path.read_text()[:40])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "rank-1.pt has 100 of 10000 bytes"),
        (flip_a_byte, "rank-0.pt has changed"),
        (lose_a_file, "rank-0.pt is missing"),
        (lose_a_rank, "not written to the end"),
        (cut_a_manifest, "manifest is cut short"),
    ],
)
def test_damage_is_seen_and_the_one_before_is_used(tmp_path: Path, damage: object, message: str) -> None:
    write(tmp_path, 4)
    damage(write(tmp_path, 8))  # type: ignore[operator]
    with pytest.raises(Damaged, match=message):
        verify(tmp_path / "step-00000008")
    said: list[str] = []
    found = newest(tmp_path, said.append)
    assert found is not None and found.step == 4
    assert len(said) == 1 and "step-00000008 is damaged" in said[0]


def test_nothing_whole_left_is_an_error(tmp_path: Path) -> None:
    truncate(write(tmp_path, 4))
    with pytest.raises(UserError, match=r"No checkpoint .* is whole"):
        newest(tmp_path, lambda _: None)


def test_going_on_forgets_what_lies_beyond(tmp_path: Path) -> None:
    write(tmp_path, 4), write(tmp_path, 8)
    (tmp_path / checkpoint.RAY_SNAPSHOT).write_text("{}")
    checkpoint.forget_after(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
