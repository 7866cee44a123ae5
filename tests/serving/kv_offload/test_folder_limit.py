"""The limit of a folder of KV blocks."""

import os
import threading
import time
from pathlib import Path

from strata.serving.kv_offload import block_file, folder_limit
from strata.serving.kv_offload.folder_limit import FolderLimit

SIZE = 1000


def write(folder: Path, name: str, limit: FolderLimit, age: float = 0.0) -> Path:
    path = folder / "weights" / name[:2] / f"{name}.bin"
    size = block_file.write(path, memoryview(bytes(SIZE)))
    if age:
        os.utime(path, (time.time() - age, time.time() - age))
    limit.wrote(size)
    return path


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.bin"))


def test_folder_stays_below_its_limit(tmp_path: Path) -> None:
    limit = FolderLimit(tmp_path, 20 * SIZE)
    for number in range(100):
        write(tmp_path, f"{number:03}", limit)
        assert total(tmp_path) <= 20 * SIZE
    assert total(tmp_path) > 12 * SIZE


def test_least_recently_used_is_deleted_first(tmp_path: Path) -> None:
    limit = FolderLimit(tmp_path, 10 * SIZE)
    old = [write(tmp_path, f"{number:03}", limit, age=1000 - number) for number in range(8)]
    block_file.read(old[0], memoryview(bytearray(SIZE)))  # a use
    write(tmp_path, "new", limit)
    left = sorted(path.stem for path in tmp_path.rglob("*.bin"))
    assert left == ["000", "003", "004", "005", "006", "007", "new"]


def test_blocks_of_other_weights_age_out(tmp_path: Path) -> None:
    limit = FolderLimit(tmp_path, 10 * SIZE)
    stale = tmp_path / "other-weights" / "aa" / "stale.bin"
    block_file.write(stale, memoryview(bytes(SIZE)))
    os.utime(stale, (1, 1))
    for number in range(10):
        write(tmp_path, f"{number:03}", limit)
    assert not stale.exists()


def test_abandoned_temporary_files_are_deleted(tmp_path: Path) -> None:
    abandoned, current, foreign = tmp_path / "a.bin.1-2.tmp", tmp_path / "b.bin.1-2.tmp", tmp_path / "notes.txt"
    for path in (abandoned, current, foreign):
        path.write_bytes(bytes(10))
        os.utime(path, (1, 1))
    os.utime(current)
    FolderLimit(tmp_path, 10 * SIZE).wrote(0)
    assert not abandoned.exists() and current.exists() and foreign.exists()


def test_several_writers_share_a_limit(tmp_path: Path) -> None:
    def fill(writer: int) -> None:
        limit = FolderLimit(tmp_path, 64 * SIZE)
        for number in range(100):
            write(tmp_path, f"{writer}-{number:03}", limit)

    threads = [threading.Thread(target=fill, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert 40 * SIZE < total(tmp_path) <= 64 * SIZE


def test_only_one_engine_sweeps(tmp_path: Path) -> None:
    limit = FolderLimit(tmp_path, SIZE)
    with folder_limit._alone(tmp_path / folder_limit.LOCK) as alone:
        assert alone
        for number in range(3):
            write(tmp_path, f"{number:03}", limit)
        assert total(tmp_path) > SIZE
    limit.sweep()
    assert total(tmp_path) <= SIZE
