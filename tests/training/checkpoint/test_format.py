import errno
import hashlib
import os
import struct
from pathlib import Path

import pytest
import torch

from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.platform.runs import Run
from strata.training.checkpoint import format, resharding
from strata.training.checkpoint.format import Damaged, Manifest, Origin, Stored, Unfinished, examine, newest, prune, verify
from strata.training.checkpoint.resharding import Reader
from strata.training.checkpoint.storage import folder
from strata.training.parallel.optimizer_state import Fragment
from strata.training.parallel.shard_map import Cut, Shard

ORIGIN = Origin(model={"layers": 2}, tokens="abc", batch=8, seed=0)
SHAPE = (6, 4)
WHOLE = torch.arange(24.0).view(SHAPE)


def write(checkpoints: Path, step: int, val_loss: float | None = None) -> Path:
    """Writes a checkpoint of two ranks, each with half of a parameter's elements."""
    target = checkpoints / f"step-{step:08}"
    for rank in range(2):
        half = WHOLE.flatten()[rank * 12 : rank * 12 + 12]
        parts = [Fragment(Shard("w", SHAPE, None, 0), "weight", rank * 12, half)]
        format.write(folder(target), rank, 2, step, ORIGIN, val_loss, parts)
    return target


def no_message(message: str) -> None:
    raise AssertionError(message)


def test_newest_checkpoint_is_found(tmp_path: Path) -> None:
    write(tmp_path, 4), write(tmp_path, 12)
    found = newest(folder(tmp_path), no_message)
    assert found is not None and (found.step, found.origin) == (12, ORIGIN)
    assert torch.equal(Reader(found).whole("w"), WHOLE)


def test_missing_folder_is_not_an_error(tmp_path: Path) -> None:
    assert newest(folder(tmp_path / "not there"), no_message) is None


def truncate(target: Path) -> None:
    path = target / "part-00001.bin"
    path.write_bytes(path.read_bytes()[:40])


def flip_a_byte(target: Path) -> None:
    path = target / "part-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def lose_a_file(target: Path) -> None:
    (target / "part-00000.bin").unlink()


def lose_a_rank(target: Path) -> None:
    (target / "manifest-00001.json").unlink()


def cut_a_manifest(target: Path) -> None:
    path = target / "manifest-00000.json"
    path.write_text(path.read_text()[:40])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "part-00001.bin has 40 of 48 bytes"),
        (flip_a_byte, "part-00000.bin has changed"),
        (lose_a_file, "part-00000.bin is missing"),
        (lose_a_rank, "it is incomplete"),
        (cut_a_manifest, "manifest is truncated"),
    ],
)
def test_damage_is_detected_and_the_previous_checkpoint_is_used(tmp_path: Path, damage: object, message: str) -> None:
    write(tmp_path, 4)
    damage(write(tmp_path, 8))  # type: ignore[operator]
    with pytest.raises(Damaged, match=message):
        verify(examine(folder(tmp_path / "step-00000008")))
    messages: list[str] = []
    found = newest(folder(tmp_path), messages.append)
    assert found is not None and found.step == 4
    assert len(messages) == 1 and "step-00000008 is damaged" in messages[0]


def test_only_damaged_checkpoints_is_an_error(tmp_path: Path) -> None:
    truncate(write(tmp_path, 4))
    with pytest.raises(UserError, match=r"All checkpoints in .* are damaged"):
        newest(folder(tmp_path), lambda _: None)


def test_unfinished_checkpoint_does_not_count(tmp_path: Path) -> None:
    """A run that was killed in its first save starts over instead of being refused."""
    lose_a_rank(write(tmp_path, 4))
    assert newest(folder(tmp_path), lambda _: None) is None


def test_resume_renames_later_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, 4), write(tmp_path, 8)
    (tmp_path / format.RAY_SNAPSHOT).write_text("{}")
    assert format.set_aside_after(folder(tmp_path), 4) == ["step-00000008.damaged"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000008.damaged"]
    write(tmp_path, 8)
    assert format.set_aside_after(folder(tmp_path), 4) == ["step-00000008.damaged-2"]
    found = newest(folder(tmp_path), no_message)
    assert found is not None and found.step == 4


def test_only_interrupted_writes_are_deleted(tmp_path: Path) -> None:
    """The marker file shows that a write was interrupted. Without it, a manifest may have been lost."""
    whole, killed, lost = write(tmp_path, 4), write(tmp_path, 8), write(tmp_path, 12)
    lose_a_rank(killed), lose_a_rank(lost)
    (killed / format.UNFINISHED).touch()
    assert not (whole / format.UNFINISHED).exists()
    assert format.set_aside_after(folder(tmp_path), 4) == ["step-00000012.damaged"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000012.damaged"]
    assert (tmp_path / "step-00000012.damaged" / "part-00001.bin").exists()


def test_failed_write_frees_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(format.Manifest, "dump", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 4)
    assert [path.name for path in (tmp_path / "step-00000004").iterdir()] == [format.UNFINISHED]


def left(checkpoints: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in checkpoints.iterdir())


def test_prune_retains_newest_and_best(tmp_path: Path) -> None:
    for step, val_loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, None), (5, 2.4)):
        write(tmp_path, step, val_loss)
    prune(folder(tmp_path), keep=2, keep_best=True)
    assert left(tmp_path) == [2, 4, 5]
    prune(folder(tmp_path), keep=1, keep_best=False)
    assert left(tmp_path) == [5]


def test_prune_ignores_a_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    write(tmp_path, 1), write(tmp_path, 2), lose_a_rank(write(tmp_path, 3))
    prune(folder(tmp_path), keep=1, keep_best=False)
    assert left(tmp_path) == [2, 3]


@pytest.mark.parametrize("saved", [[None], [Cut(0, 0, 3), Cut(0, 3, 6)], [Cut(1, 0, 1), Cut(1, 1, 4)]])
@pytest.mark.parametrize("wanted", [None, Cut(0, 0, 2), Cut(0, 3, 6), Cut(1, 2, 4)])
def test_any_shard_is_read_from_any_layout(tmp_path: Path, saved: list[Cut | None], wanted: Cut | None) -> None:
    for rank, cut in enumerate(saved):
        shard = Shard("w", SHAPE, cut, 0)
        flat = resharding._narrow(WHOLE, cut).flatten().contiguous()
        middle = flat.numel() // 3
        parts = [Fragment(shard, "weight", middle, flat[middle:]), Fragment(shard, "weight", 0, flat[:middle])]
        format.write(folder(tmp_path), rank, len(saved), 1, ORIGIN, None, parts)
    read = Reader(examine(folder(tmp_path))).read(Shard("w", SHAPE, wanted, 0), "weight")
    assert torch.equal(read, resharding._narrow(WHOLE, wanted))


@pytest.mark.parametrize("wanted", [None, Cut(0, 0, 3), Cut(0, 2, 6)])
def test_range_of_a_shard_is_read_from_any_layout(tmp_path: Path, wanted: Cut | None) -> None:
    for rank, cut in enumerate([Cut(0, 0, 3), Cut(0, 3, 6)]):
        part = Fragment(Shard("w", SHAPE, cut, 0), "weight", 0, resharding._narrow(WHOLE, cut).flatten())
        format.write(folder(tmp_path), rank, 2, 1, ORIGIN, None, [part])
    read = Reader(examine(folder(tmp_path))).read_range(Shard("w", SHAPE, wanted, 0), "weight", 3, 11)
    assert torch.equal(read, resharding._narrow(WHOLE, wanted).flatten()[3:11])


def test_read_range_reads_only_the_requested_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(examine(folder(write(tmp_path, 4))))
    read: list[tuple[str, int, int]] = []
    whole = Reader._read_at
    monkeypatch.setattr(Reader, "_read_at", lambda self, *place: read.append(place) or whole(self, *place))
    assert torch.equal(reader.read_range(Shard("w", SHAPE, None, 0), "weight", 13, 17), WHOLE.flatten()[13:17])
    assert read == [("part-00001.bin", 4, 16)]


def test_identity_depends_on_content(tmp_path: Path) -> None:
    first, again, other = (examine(folder(write(tmp_path / name, step))) for name, step in (("a", 4), ("b", 4), ("c", 8)))
    assert first.identity == again.identity != other.identity


def test_manifest_is_the_same_after_a_round_trip() -> None:
    stored = (Stored("w", "weight", (6, 4), Cut(1, 2, 4), 3, 9, 36), Stored("v", "exp_avg", (2,), None, 0, 2, 72))
    origin = Origin({"layers": 2}, "abc", 8, 5, "run1")
    for manifest in (Manifest(7, origin, 2, "part-00001.bin", 80, "ff", stored, 2.5), Manifest(7, origin, 1, "p", 0, "", ())):
        assert Manifest.parse(manifest.dump()) == manifest


def test_files_of_a_rank(tmp_path: Path) -> None:
    """Values are little-endian floats, one fragment after another."""
    first = Fragment(Shard("a", (2,), None, 0), "weight", 0, torch.tensor([1.0, 2.0]))
    second = Fragment(Shard("b", (6, 4), Cut(0, 2, 4), 0), "exp_avg", 3, torch.tensor([3.0, 4.0, 5.0]))
    format.write(folder(tmp_path), 12, 1, 7, ORIGIN, 2.5, [first, second])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest-00012.json", "part-00012.bin"]
    assert (tmp_path / "part-00012.bin").read_bytes() == struct.pack("<5f", 1, 2, 3, 4, 5)
    [manifest] = examine(folder(tmp_path)).manifests
    assert (manifest.step, manifest.ranks, manifest.size, manifest.val_loss) == (7, 1, 20, 2.5)
    assert manifest.sha256 == hashlib.sha256(struct.pack("<5f", 1, 2, 3, 4, 5)).hexdigest()
    assert manifest.stored == (
        Stored("a", "weight", (2,), None, 0, 2, 0),
        Stored("b", "exp_avg", (6, 4), Cut(0, 2, 4), 3, 3, 8),
    )


def test_marker_is_removed_by_the_last_rank(tmp_path: Path) -> None:
    for rank in range(3):
        format.write(folder(tmp_path), rank, 3, 1, ORIGIN, None, [])
        assert (tmp_path / format.UNFINISHED).exists() == (rank < 2)
        assert format.written(folder(tmp_path)) == rank + 1


def test_failed_write_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's errors have no path; others have one already."""
    for error, name in ((OSError("[Errno 28] full"), "part-00000.bin"), (OSError(28, "full", "other"), "other")):

        def fail(*_: object, error: OSError = error) -> None:
            raise error

        monkeypatch.setattr(format, "_write_part", fail)
        with pytest.raises(OSError, match="full") as raised:
            format.write(folder(tmp_path), 0, 1, 1, ORIGIN, None, [])
        assert raised.value.errno == 28 and Path(raised.value.filename).name == name


def test_size_and_time_of_a_checkpoint(tmp_path: Path) -> None:
    found = examine(folder(write(tmp_path, 4)))
    assert found.size == 96
    for number, at in ((0, 2000), (1, 1000)):
        os.utime(tmp_path / "step-00000004" / f"manifest-0000{number}.json", (at, at))
    os.utime(tmp_path / "step-00000004" / "part-00000.bin", (3000, 3000))
    assert found.whole_at() == 2000


def test_time_is_unknown_without_modification_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(folder(write(tmp_path, 4)))
    monkeypatch.setattr(type(found.folder), "written_at", lambda *_: None)
    assert found.whole_at() is None


@pytest.mark.parametrize(("target", "expected"), [(None, "{run}/checkpoints"), ("/bucket", "/bucket/mine")])
def test_location_of_checkpoints(tmp_path: Path, small_recipe: Recipe, target: str | None, expected: str) -> None:
    train = small_recipe.train.model_copy(update={"checkpoints": target})
    assert format.location(Run(tmp_path / "mine"), train).path == expected.format(run=tmp_path / "mine")


def test_names_of_steps() -> None:
    assert [format.folder_name(step) for step in (7, 12345678, 123456789)] == ["step-00000007", "step-12345678", "step-123456789"]
    assert [format.step_of(name) for name in ("step-00000007", "step-123456789")] == [7, 123456789]


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    for name in ("step-00000007", "step-99999999", "step-100000000", "step-0000007", "step-00000007.damaged", "other"):
        (tmp_path / name).mkdir()
    assert format.step_names(folder(tmp_path)) == ["step-100000000", "step-99999999", "step-00000007"]


def test_manifests_of_different_steps_are_incomplete(tmp_path: Path) -> None:
    for rank, step in ((0, 4), (1, 5)):
        format.write(folder(tmp_path), rank, 2, step, ORIGIN, None, [])
    with pytest.raises(Unfinished):
        examine(folder(tmp_path))


@pytest.mark.parametrize("written", [0, 1, 3])
def test_another_number_of_manifests_is_incomplete(tmp_path: Path, written: int) -> None:
    for rank in range(written):
        format.write(folder(tmp_path), rank, 2, 4, ORIGIN, None, [])
    with pytest.raises(Unfinished):
        examine(folder(tmp_path))


def test_ranks_verify_their_own_files(tmp_path: Path) -> None:
    target = write(tmp_path, 4)
    found = examine(folder(target))
    flip_a_byte(target)
    verify(found, found.manifests[1:])
    with pytest.raises(Damaged, match=r"part-00000\.bin has changed"):
        verify(found, found.manifests[:1])


def test_damage_beside_an_unfinished_checkpoint_is_an_error(tmp_path: Path) -> None:
    truncate(write(tmp_path, 4))
    lose_a_rank(write(tmp_path, 8))
    messages: list[str] = []
    with pytest.raises(UserError, match="are damaged"):
        newest(folder(tmp_path), messages.append)
    assert messages == [
        "Checkpoint step-00000008 is damaged (it is incomplete); trying the previous one.",
        "Checkpoint step-00000004 is damaged (part-00001.bin has 40 of 48 bytes); trying the previous one.",
    ]


@pytest.mark.parametrize(
    ("losses", "keep", "keep_best", "remaining"),
    [
        ([3.0, 2.0, 2.5], 3, True, [1, 2, 3]),
        ([3.0, 2.0, 2.5], 2, True, [2, 3]),
        ([2.0, 3.0, 2.5], 1, True, [1, 3]),
        ([2.0, 3.0, 2.5], 1, False, [3]),
        ([2.0, 2.0, 2.5], 1, True, [2, 3]),  # of equal losses, the newer
        ([None, None, None], 1, True, [3]),
        ([None, 0.0, 2.5], 1, True, [2, 3]),
    ],
)
def test_checkpoints_that_are_retained(
    tmp_path: Path, losses: list[float | None], keep: int, keep_best: bool, remaining: list[int]
) -> None:
    for step, loss in enumerate(losses, 1):
        write(tmp_path, step, loss)
    found = prune(folder(tmp_path), keep, keep_best)
    assert left(tmp_path) == remaining
    assert found is not None and found.step == 3


def test_prune_of_an_empty_folder(tmp_path: Path) -> None:
    assert prune(folder(tmp_path / "none"), 3, True) is None


def test_which_folders_are_unfinished(tmp_path: Path) -> None:
    whole, damaged, unmarked, killed = (write(tmp_path, step) for step in (1, 2, 3, 4))
    for target in (whole, damaged, killed):
        (target / format.UNFINISHED).touch()
    truncate(damaged), lose_a_rank(unmarked), lose_a_rank(killed)
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000006").touch()
    found = [format.is_unfinished(folder(tmp_path / f"step-0000000{step}")) for step in range(1, 7)]
    assert found == [False, False, False, True, True, False]


def test_names_of_renamed_checkpoints_are_free(tmp_path: Path) -> None:
    for expected in ("x", "x-2", "x-3", "x-4"):
        assert format._free_name(folder(tmp_path), "x") == expected
        (tmp_path / expected).mkdir()


def test_checkpoints_of_a_single_rank(tmp_path: Path) -> None:
    for step, loss in ((1, 2.0), (2, 3.0), (3, 2.5)):
        format.write(folder(tmp_path / f"step-0000000{step}"), 0, 1, step, ORIGIN, loss, [])
    found = prune(folder(tmp_path), keep=1, keep_best=True)
    assert left(tmp_path) == [1, 3]
    assert found is not None and found.origin == ORIGIN
