"""Copying of a worker's output to the run's storage: whole lines, bounded files, and a worker that is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from strata.training.logs import capture, shipper
from strata.training.logs.shipper import Log, Shipper, Source

OURS = b"[strata] "


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "store" / "attempt-1"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "worker.out"


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def copied(place: Path, rank: int = 3) -> bytes:
    """The log without the lines of the shipper."""
    lines = (place / f"rank-{rank}.log").read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(OURS))


def shipping(place: Path, *sources: Path) -> Shipper:
    return Shipper(Log([place], 3), sources, place.parent / "flight-3", "rank 3")


def test_lines_are_copied_whole_until_the_worker_has_ended(place: Path, output: Path) -> None:
    ship = shipping(place, output)
    append(output, b"one\ntw")
    ship.copy(ended=False)
    assert copied(place) == b"one\n"
    append(output, b"o\nthree")
    ship.copy(ended=False)
    assert copied(place) == b"one\ntwo\n"
    ship.copy(ended=True)
    assert copied(place) == b"one\ntwo\nthree\n"
    text = (place / "rank-3.log").read_bytes()
    assert text.startswith(b"[strata] rank 3, ") and text.count(b"the process has ended") == 1


def test_sources_share_one_log_and_may_appear_later(place: Path, output: Path) -> None:
    other = output.with_name("nccl")
    ship = shipping(place, output, other)
    append(output, b"a\n")
    ship.copy(ended=False)
    append(other, b"NCCL WARN b\n")
    append(output, b"c\n")
    ship.copy(ended=False)
    assert copied(place) == b"a\nc\nNCCL WARN b\n"


def test_a_long_line_without_an_end_is_copied(place: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "LONGEST_LINE", 8)
    ship = shipping(place, output)
    append(output, b"1234567")
    ship.copy(ended=False)
    assert copied(place) == b""
    append(output, b"8")
    ship.copy(ended=False)
    assert copied(place) == b"12345678"


def test_a_log_is_bounded_and_has_the_newest_text(place: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "LIMIT", 1000)
    ship = shipping(place, output)
    lines = [f"line {number:04}\n".encode() for number in range(500)]
    for line in lines:
        append(output, line)
        ship.copy(ended=False)
    older, newer = (place / "rank-3.log.1").read_bytes(), (place / "rank-3.log").read_bytes()
    assert len(older) <= 1000 and len(newer) <= 1000 and len(older) > 900
    assert (older + newer).endswith(b"".join(lines[-90:]))


def test_text_beyond_the_limit_is_left_out_with_a_note(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "LIMIT", 10)
    append(output, b"abcde\n" * 4)
    text, offset = Source(output, offset=6).read(ended=False)
    note, rest = text.split(b"\n", 1)
    assert b"8 bytes are left out" in note and rest == b"cde\nabcde\n" and offset == 24


def test_a_truncated_file_is_read_from_its_beginning(output: Path) -> None:
    append(output, b"new\n")
    assert Source(output, offset=100).read(ended=False) == (b"new\n", 4)


class Full(Log):
    """Storage that is full for the first calls, after it has accepted a part of the text."""

    def __init__(self, place: Path, failures: int) -> None:
        super().__init__([place], 3)
        self.failures = failures

    def append(self, text: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        super().append(text)


def test_full_storage_loses_and_repeats_nothing(place: Path, output: Path) -> None:
    ship = Shipper(Full(place, 2), [output], place / "none", "rank 3")
    for line in (b"one\n", b"two\n"):
        append(output, line)
        with pytest.raises(OSError, match="No space"):
            ship.copy(ended=False)
    append(output, b"three\n")
    ship.copy(ended=False)
    assert copied(place) == b"one\ntwo\nthree\n"
    assert (place / "rank-3.log").read_bytes().count(b"[strata] rank 3") == 1


def test_logs_follow_a_run_whose_folder_is_moved(place: Path, output: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    ship = Shipper(Log([place, moved], 3), [output], place / "none", "rank 3")
    append(output, b"one\n")
    ship.copy(ended=False)
    place.rename(moved)
    append(output, b"two\n")
    ship.copy(ended=True)
    assert copied(moved) == b"one\ntwo\n" and not place.exists()
    moved.rename(tmp_path / "elsewhere")
    append(output, b"three\n")
    with pytest.raises(FileNotFoundError):  # a deleted run does not come back
        ship.copy(ended=True)


def test_a_dump_is_copied_when_it_is_complete(place: Path, output: Path) -> None:
    dump = place.parent / "flight-3"
    ship = shipping(place, output)
    dump.write_bytes(b"half")
    ship.copy(ended=False)
    assert not (place / "flight-3").exists()
    past = time.time() - 60
    os.utime(dump, (past, past))
    ship.copy(ended=False)
    assert (place / "flight-3").read_bytes() == b"half"
    dump.write_bytes(b"whole")
    ship.copy(ended=True)
    assert (place / "flight-3").read_bytes() == b"whole"
    assert sorted(path.name for path in place.iterdir()) == ["flight-3", "rank-3.log"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


WORKER = """
import sys
from pathlib import Path
from strata.training.logs import capture
capture.start([Path(sys.argv[1])], 3)
import os
print("written before the kill", flush=True)
Path(os.environ["NCCL_DEBUG_FILE"]).write_text("NCCL WARN unexpected\\n")
Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "3").write_bytes(b"dump")
sys.stderr.write("the last words, without a line end")
sys.stderr.flush()
print("ready", file=open(sys.argv[2], "w"), flush=True)
sys.stdin.read()
"""


def worker(place: Path, output: Path) -> subprocess.Popen[bytes]:
    ready = output.with_name("ready")
    with output.open("wb") as out, output.with_name("worker.err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(place), str(ready)], stdin=subprocess.PIPE, stdout=out, stderr=err
        )
    wait_for(ready.exists)
    return process


@pytest.mark.parametrize("folder_exists", [True, False])
def test_a_killed_worker_leaves_all_it_has_written(place: Path, output: Path, folder_exists: bool) -> None:
    """Without the folder, storage is unreachable: the worker starts and ends all the same."""
    if not folder_exists:
        place.rmdir()
    process = worker(place, output)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    if not folder_exists:
        assert not place.exists()
        place.mkdir()
    wait_for(lambda: (place / "flight-3").exists())
    log = (place / "rank-3.log").read_bytes()
    for text in (b"written before the kill\n", b"NCCL WARN unexpected\n", b"the last words, without a line end\n"):
        assert text in log
    assert b"the process has ended" in log
    assert (place / "flight-3").read_bytes() == b"dump"


def test_hanging_storage_stops_neither_the_worker_nor_its_end(place: Path, output: Path) -> None:
    log = place / "rank-3.log"
    os.mkfifo(log)  # to open it for writing blocks until someone reads
    process = worker(place, output)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    log.rename(place / "hanging")
    os.close(os.open(place / "hanging", os.O_RDONLY | os.O_NONBLOCK))  # storage answers again
    wait_for(lambda: (place / "flight-3").exists())
    assert b"written before the kill\n" in log.read_bytes()


def test_the_users_variables_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG_FILE", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/dumps/mine_")
    nccl, flight = capture._diagnostics(tmp_path, 3)
    assert os.environ["NCCL_DEBUG"] == "INFO" and flight == "/dumps/mine_3"
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ and os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert nccl == os.environ["NCCL_DEBUG_FILE"] == str(tmp_path / "nccl")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/logs/nccl.%p")
    assert capture._diagnostics(tmp_path, 3)[0] == f"/logs/nccl.{os.getpid()}"
