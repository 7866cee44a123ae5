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
