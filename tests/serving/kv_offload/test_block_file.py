"""Files of KV blocks: read whole or not at all."""

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from strata.serving.kv_offload import block_file
from strata.serving.kv_offload.block_file import Damaged

SIZE = 4096


def block(seed: int = 1, size: int = SIZE) -> memoryview:
    return memoryview(bytes((seed * 31 + number) % 251 for number in range(size)))


def read(path: Path, size: int = SIZE) -> bytes:
    content = bytearray(size)
    block_file.read(path, memoryview(content))
    return bytes(content)


def test_written_block_is_read(tmp_path: Path) -> None:
    path = tmp_path / "abc" / "de_g0" / "name.bin"
    assert block_file.write(path, block()) == SIZE + block_file.ENDING.size
    assert read(path) == block()
    assert block_file.write(path, block()) == 0, "it exists"
    assert [file.name for file in path.parent.iterdir()] == ["name.bin"]


@pytest.mark.parametrize("damage", ["a byte", "a bit of the checksum", "shorter", "longer", "empty", "without an end", "zeros"])
def test_damaged_file_is_deleted_and_not_read(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "name.bin"
    block_file.write(path, block())
    whole = path.read_bytes()
    changed = {
        "a byte": whole[:100] + bytes([whole[100] ^ 255]) + whole[101:],
        "a bit of the checksum": whole[:-1] + bytes([whole[-1] ^ 1]),
        "shorter": whole[: SIZE // 2],
        "longer": whole + b"x",
        "empty": b"",
        "without an end": whole[:SIZE],
        "zeros": bytes(len(whole)),
    }
    path.write_bytes(changed[damage])
    with pytest.raises(Damaged):
        read(path)
    assert not path.exists()


def test_file_under_another_name_is_not_read(tmp_path: Path) -> None:
    block_file.write(tmp_path / "one.bin", block())
    (tmp_path / "one.bin").rename(tmp_path / "other.bin")
    with pytest.raises(Damaged):
        read(tmp_path / "other.bin")


def test_file_of_another_block_size_is_not_read(tmp_path: Path) -> None:
    block_file.write(tmp_path / "one.bin", block())
    with pytest.raises(Damaged):
        read(tmp_path / "one.bin", SIZE // 2)


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.write, []

    def full(descriptor: int, content: memoryview) -> int:
        calls.append(descriptor)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content[:100])

    monkeypatch.setattr(block_file.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        block_file.write(tmp_path / "one.bin", block())
    assert list(tmp_path.iterdir()) == []


def write_forever(folder: Path) -> None:
    number = 0
    while True:
        block_file.write(folder / f"{number}.bin", block(number, 1 << 20))
        number += 1


def test_killed_writer_leaves_whole_blocks_and_a_temporary_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # a spawned process would not find this module
    writer = context.Process(target=write_forever, args=(tmp_path,), daemon=True)
    writer.start()
    deadline = time.monotonic() + 240
    while len(list(tmp_path.glob("*.bin"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(30)
    for path in tmp_path.glob("*.bin"):
        assert read(path, 1 << 20) == block(int(path.stem), 1 << 20)
    assert len(list(tmp_path.glob(f"*{block_file.TEMPORARY}"))) <= 1
