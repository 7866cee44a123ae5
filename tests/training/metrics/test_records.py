import json
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from strata.training.metrics import records
from strata.training.metrics.records import Follower, Record, Writer


def record(step: int) -> Record:
    return Record(step=step, loss=1.0 / step, lr=0.1, grad_norm=None, tokens_per_s=10.0, time=0.0)


def steps(found: object) -> list[int]:
    return [item["step"] for item in found]  # type: ignore[attr-defined]


def test_follower_reads_each_record_once_and_no_partial_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert steps(follower.new()) == []
    records.append(path, record(1))
    records.append(path, record(2))
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert steps(follower.new()) == [1, 2]
    assert steps(follower.new()) == []
    with path.open("a") as file:
        file.write('ss": 0.5}\n')
    assert steps(follower.new()) == [3]


def test_cut_removes_later_steps_and_a_partial_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 6):
        records.append(path, record(step))
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    follower = Follower(path)
    assert steps(follower.new()) == [1, 2, 3, 4, 5]
    records.cut(path, 3)
    records.append(path, record(4))
    assert steps(records.read(path)) == [1, 2, 3, 4]
    assert steps(follower.new()) == [1, 2, 3, 4]


def test_follower_continues_in_a_rewritten_file(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    follower = Follower(path)
    records.append(path, record(1), record(2))
    assert steps(follower.new()) == [1, 2]
    shutil.copy(path, other)
    records.append(other, record(3))
    other.replace(path)
    assert steps(follower.new()) == [3]


@pytest.mark.parametrize(("write_s", "writes"), [(0.0001, [1] * 10), (0.1, [1, 4, 4, 1])])
def test_writer_batches_only_on_slow_storage_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_s: float, writes: list[int]
) -> None:
    """Each step takes half a second."""
    path, append, seen, now = tmp_path / "metrics.jsonl", records.append, list[int](), 100.0

    def timed(path: Path, *some: Record) -> None:
        nonlocal now
        now += write_s
        seen.append(len(some))
        append(path, *some)

    monkeypatch.setattr(records, "append", timed)
    monkeypatch.setattr(records, "time", SimpleNamespace(monotonic=lambda: now))
    with Writer(path) as writer:
        for step in range(1, 11):
            writer.append(record(step))
            now += 0.5
    assert steps(records.read(path)) == list(range(1, 11)) and seen == writes


def test_flush_writes_pending_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "time", SimpleNamespace(monotonic=iter(range(100, 200)).__next__))  # each write takes a second
    with Writer(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 5):
            writer.append(record(step))
        assert steps(records.read(tmp_path / "metrics.jsonl")) == [1]
        writer.flush()
        assert steps(records.read(tmp_path / "metrics.jsonl")) == [1, 2, 3, 4]


def test_full_disk_leaves_no_partial_line_and_records_are_retried(tmp_path: Path) -> None:
    """The kernel enforces a limit on the file size in the middle of a write, like a full disk."""
    path = tmp_path / "metrics.jsonl"
    with Writer(path) as writer:
        writer.append(record(1))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
        try:
            writer.append(record(2))
            writer.flush()
            assert writer.problem is not None and str(path) in str(writer.problem)
            assert steps(records.read(path)) == [1] and path.read_bytes().endswith(b"}\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        writer.append(record(3))
        writer.flush()
        assert writer.problem is None
    assert steps(records.read(path)) == [1, 2, 3]


def test_unreadable_lines_are_saved_to_another_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records.append(path, record(1))
    with path.open("ab") as file:
        file.write(b"\xff\x00garbage\n[]\n")
    records.append(path, record(2), record(3))
    assert steps(records.read(path)) == [1, 2, 3] == steps(Follower(path).new())
    before = path.read_bytes()
    records.cut(path, 2)
    assert steps(records.read(path)) == [1, 2]
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == before


class Slow:
    """File that accepts at most 7 bytes a write, as on a nearly full disk."""

    def __init__(self) -> None:
        self.data, self.sizes = b"before\n", list[int]()

    def __enter__(self) -> "Slow":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tell(self) -> int:
        return len(self.data)

    def write(self, data: bytes) -> int:
        self.data += data[:7]
        self.sizes.append(len(data))
        return len(data[:7])

    def truncate(self, size: int) -> None:
        self.data = self.data[:size]


def test_partial_writes_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Slow()
    monkeypatch.setattr(Path, "open", lambda *_, **__: file)
    records.append(Path("metrics.jsonl"), record(1), record(2))
    expected = "".join(json.dumps(record(step)) + "\n" for step in (1, 2)).encode()
    assert file.data == b"before\n" + expected
    assert file.sizes == list(range(len(expected), 0, -7))


def test_interrupted_append_leaves_the_file_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Slow()
    write = file.write

    def interrupted(data: bytes) -> int:
        if file.sizes:
            raise KeyboardInterrupt
        return write(data)

    file.write = interrupted  # type: ignore[method-assign]
    monkeypatch.setattr(Path, "open", lambda *_, **__: file)
    with pytest.raises(KeyboardInterrupt):
        records.append(Path("metrics.jsonl"), record(1))
    assert file.data == b"before\n"


@pytest.mark.parametrize(("wait", "written"), [(39, 1), (40, 3), (41, 3)])
def test_writes_use_a_twentieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: int, written: int) -> None:
    """A write of 2 s is followed by 40 s without one."""
    path, now, append = tmp_path / "metrics.jsonl", 0, records.append

    def timed(path: Path, *some: Record) -> None:
        nonlocal now
        now += 2
        append(path, *some)

    monkeypatch.setattr(records, "append", timed)
    monkeypatch.setattr(records, "time", SimpleNamespace(monotonic=lambda: now))
    writer = Writer(path)
    writer.append(record(1))
    assert steps(records.read(path)) == [1]  # even if the clock starts at 0
    writer.append(record(2))
    now = 2 + wait
    writer.append(record(3))
    assert steps(records.read(path)) == list(range(1, written + 1))


def test_newest_checkpoint_in_the_history(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert records.last_saved(path) == 0
    records.append(path, record(1))
    assert records.last_saved(path) == 0
    records.append(path, {**record(5), "checkpoint_step": 4}, {**record(9), "checkpoint_step": 8}, record(10))
    records.append(path, {**record(3), "checkpoint_step": 2})  # repeated after a resume
    assert records.last_saved(path) == 8


@pytest.mark.parametrize(
    ("line", "readable"),
    [
        (b'{"step": 3, "loss": 0.5}\n', True),
        (b'{"step": 3, "loss": 1}\n', True),
        (b'{"step": 3, "loss": 0.5}', False),
        (b'{"step": 3}\n', False),
        (b'{"loss": 0.5}\n', False),
        (b'{"step": 3.5, "loss": 0.5}\n', False),
        (b'{"step": 3, "loss": null}\n', False),
        (b'{"step": 3, "loss": "0.5"}\n', False),
        (b"[3, 0.5]\n", False),
        (b'{"step": 3, "lo\n', False),
        (b"\n", False),
    ],
)
def test_record_is_a_whole_line_with_step_and_loss(tmp_path: Path, line: bytes, readable: bool) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line)
    assert records.parse(line) == (json.loads(line) if readable else None)
    assert steps(records.read(tmp_path / "metrics.jsonl")) == ([3] if readable else [])


@pytest.mark.parametrize(
    ("content", "step", "after", "damaged"),
    [
        (b'{"step": 1, "loss": 1}\n{"step": 2, "loss": 1}\n', 2, None, False),
        (b'{"step": 1, "loss": 1}\n{"step": 2, "loss": 1}\n', 1, b'{"step": 1, "loss": 1}\n', False),
        (b'{"step": 1, "loss": 1}\n{"step": 2, "loss": 1}\n', 0, b"", False),
        (b'{"step": 1, "loss": 1}\n{"step": 2, "lo', 2, b'{"step": 1, "loss": 1}\n', False),
        (b'garbage\n{"step": 1, "loss": 1}\n', 2, b'{"step": 1, "loss": 1}\n', True),
        (b'garbage\n{"step": 1, "lo', 2, b"", True),
    ],
)
def test_cut_rewrites_only_what_changes(tmp_path: Path, content: bytes, step: int, after: bytes | None, damaged: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    inode = path.stat().st_ino
    records.cut(path, step)
    assert path.read_bytes() == (content if after is None else after)
    assert (path.stat().st_ino == inode) == (after is None)
    copy = tmp_path / "metrics.jsonl.damaged"
    assert copy.exists() == damaged and (not damaged or copy.read_bytes() == content)


def test_cut_of_a_missing_history_does_nothing(tmp_path: Path) -> None:
    records.cut(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_follower_notices_a_file_with_another_last_line(tmp_path: Path) -> None:
    """The new file is as long as the old one, so only the content of the last line differs."""
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    records.append(path, record(2), record(4))
    assert steps(follower.new()) == [2, 4]
    path.unlink()
    records.append(path, record(2), record(5), record(8))
    assert steps(follower.new()) == [2, 5, 8]
    assert steps(follower.new()) == []
