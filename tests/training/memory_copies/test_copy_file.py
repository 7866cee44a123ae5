"""Copy files: torn, truncated and foreign ones are not complete, and complete ones load in any layout."""

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from strata.training.checkpoint import resharding
from strata.training.checkpoint.format import Checkpoint, Origin
from strata.training.checkpoint.storage import folder
from strata.training.memory_copies import folders, recovery
from strata.training.memory_copies.copier import Copier
from strata.training.memory_copies.copy_file import CopyFile, checksum, examine, is_intact
from strata.training.parallel.optimizer_state import Fragment
from strata.training.parallel.shard_map import Cut, Shard

from ..parallel.ranks import CONTEXT

ORIGIN = Origin({"layers": 2}, "tokens", 4, 0, "run")
SHAPE = (6, 10)
WHOLE = torch.arange(1.0, 61.0).view(SHAPE)


def halves(rank: int, whole: torch.Tensor = WHOLE) -> list[Fragment]:
    """Rank 0 or 1 of a layout that splits the columns, with an odd number of elements in each fragment."""
    cut = Cut(1, 5 * rank, 5 * rank + 5)
    flat = whole[:, cut.start : cut.stop].flatten()
    shard = Shard("w", SHAPE, cut, 0)
    return [Fragment(shard, "weight", 0, flat[:13]), Fragment(shard, "weight", 13, flat[13:])]


def write(into: Path, rank: int, step: int, origin: Origin = ORIGIN, ranks: int = 2, factor: int = 1) -> Path:
    parts = halves(rank, WHOLE * factor)
    file = CopyFile(into, rank, ranks, origin, parts)
    file.begin()
    torch._foreach_copy_(file.values, [part.values for part in parts])
    file.finish(step, checksum(file.words))
    return file.path


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_copy_is_read_in_another_layout(tmp_path: Path) -> None:
    copies = [examine(write(tmp_path, rank, 7)) for rank in (0, 1)]
    found = [copy for copy in copies if copy]
    assert [(copy.step, copy.rank, copy.ranks) for copy in found] == [(7, 0, 2), (7, 1, 2)]
    reader = resharding.Reader(Checkpoint(folder(tmp_path), 7, tuple(copy.manifest for copy in found)))
    assert torch.equal(reader.whole("w"), WHOLE)
    rows = Shard("w", SHAPE, Cut(0, 2, 5), 0)
    assert torch.equal(reader.read_range(rows, "weight", 3, 21), WHOLE[2:5].flatten()[3:21])


@pytest.mark.parametrize("at", [0, 8, 20, 40, 70, 200])
def test_damaged_header_or_table_is_no_copy(tmp_path: Path, at: int) -> None:
    path = write(tmp_path, 0, 7)
    assert examine(path)
    damage(path, at)
    assert examine(path) is None


def test_damaged_values_are_detected(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 7)
    copy = examine(path)
    assert copy and is_intact(path, copy)
    damage(path, -50)
    assert not is_intact(path, copy)


@pytest.mark.parametrize("to", [0, 10, 63, 64, 100, 4096, -4, -1])
def test_truncated_file_is_no_copy(tmp_path: Path, to: int) -> None:
    path = write(tmp_path, 0, 7)
    os.truncate(path, to if to >= 0 else path.stat().st_size + to)
    assert examine(path) is None


def test_missing_and_foreign_files_are_no_copies(tmp_path: Path) -> None:
    assert examine(tmp_path / "rank-none") is None
    (tmp_path / "rank-text").write_text("text" * 1000)
    assert examine(tmp_path / "rank-text") is None
    write(tmp_path, 0, 7, replace(ORIGIN, run="another"))
    write(tmp_path, 0, 7, replace(ORIGIN, seed=1))
    assert recovery.complete(tmp_path, ORIGIN) == []


def copy_forever(into: Path, step: int, ready: Connection) -> None:
    """Trains and copies until it is killed. Every value of a step is the step's number."""
    values = torch.full((1 << 20,), float(step))
    parts = [Fragment(Shard("w", tuple(values.shape), None, 0), "weight", 0, values)]
    copier = Copier(into, parts, ORIGIN, 0, 1, 1, list(into.glob("rank-*")))
    ready.send(True)
    while True:
        copier.before_update()
        step += 1
        values.fill_(step)
        copier.after_step(step)


@pytest.mark.rotation
def test_kill_during_a_copy_leaves_the_copy_before(tmp_path: Path) -> None:
    step = 0
    for number in range(10):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=copy_forever, args=(tmp_path, step, theirs))
        process.start()
        assert ours.poll(60)
        time.sleep(0.001 * 2**number)
        process.kill()
        process.join()
        copies = recovery.complete(tmp_path, ORIGIN)
        for copy in copies:
            assert is_intact(tmp_path / copy.manifest.file, copy)
            data = np.fromfile(tmp_path / copy.manifest.file, np.float32)[-(1 << 20) :]
            assert (data == copy.step).all(), "the copy mixes two steps"
        newest = max((copy.step for copy in copies), default=0)
        assert newest >= step, "a copy was lost before a newer one was complete"
        for path in tmp_path.glob("rank-*"):  # as restarted workers do
            if path.name not in {copy.manifest.file for copy in copies if copy.step == newest}:
                path.unlink()
        step = newest
    assert step > 10


def test_newest_step_needs_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folders.ROOT, str(tmp_path))
    with folders.owned("run"):
        here = folders.folder("run")
        assert here and recovery.newest("run", ORIGIN) is None
        for rank, step in ((0, 5), (1, 5), (0, 6)):
            write(here, rank, step, factor=step)
        write(here, 0, 9, ranks=3)
        found = recovery.newest("run", ORIGIN)
        assert found and found.step == 5 and torch.equal(resharding.Reader(found).whole("w"), 5 * WHOLE)
        last = write(here, 1, 6, factor=6)
        found = recovery.newest("run", ORIGIN)
        assert found and found.step == 6 and torch.equal(resharding.Reader(found).whole("w"), 6 * WHOLE)
        damage(last, -50)
        found = recovery.newest("run", ORIGIN)
        assert found and found.step == 5
        copies = recovery.complete(here, ORIGIN)
        assert recovery.newest_whole(copies, last=4) == []
    assert recovery.newest("run", ORIGIN) is None


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Mounts a tmpfs of one megabyte, which requires root."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("fits", [0, 1])
def test_full_tmpfs_ends_the_copies_and_not_the_run(small_tmpfs: Path, fits: int, capsys: pytest.CaptureFixture[str]) -> None:
    """No file fits, or only the first of two."""
    values = torch.zeros((700 if fits else 2000) << 8)
    parts = [Fragment(Shard("w", tuple(values.shape), None, 0), "weight", 0, values)]
    copier = Copier(small_tmpfs, parts, ORIGIN, 0, 1, 1, [])
    for step in range(1, 6):
        copier.before_update()
        values.fill_(step)
        copier.after_step(step)
    copier.before_update()
    assert copier.problem and copier.problem.errno == errno.ENOSPC
    assert capsys.readouterr().err.count("no more: ") == 1
    assert [copy.step for copy in recovery.complete(small_tmpfs, ORIGIN)] == [1] * fits
    assert len(list(small_tmpfs.iterdir())) == fits


def test_optimizer_waits_for_a_slow_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(8)
    parts = [Fragment(Shard("w", (8,), None, 0), "weight", 0, values)]
    copier = Copier(tmp_path, parts, ORIGIN, 0, 1, 2, [])
    monkeypatch.setattr("strata.training.memory_copies.copier.checksum", lambda words: time.sleep(0.2) or checksum(words))
    for step in range(1, 7):
        copier.before_update()
        assert sorted(copy.step for copy in recovery.complete(tmp_path, ORIGIN)) == [s for s in (2, 4) if s < step <= s + 4]
        values.fill_(step)
        copier.after_step(step)
    copier.before_update()
    for copy in recovery.complete(tmp_path, ORIGIN):
        assert (np.fromfile(tmp_path / copy.manifest.file, np.float32)[-8:] == copy.step).all()
    record: dict[str, dict[str, float]] = {}
    copier.measure(record)  # type: ignore[arg-type]
    assert record["seconds"]["memory_copy"] >= 0.5, "three copies, each of which blocked the next step"
