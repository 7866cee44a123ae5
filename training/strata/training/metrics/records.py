"""`metrics.jsonl`: one JSON object a step, appended by rank 0 and followed by the driver, on storage they share.

`ray.train.report` would carry these too, but it is a barrier for all ranks: too slow for every step of a live display.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict, cast

from strata.platform.files import write_atomic

REQUIRED = {"step": int, "loss": int | float}


class Record(TypedDict):
    """What is not required is there where it is known: `mfu` on devices whose peak is, the checkpoint's times on steps that
    saved one, `checkpoint_step` of the newest whole checkpoint, `peak_memory_bytes` of rank 0, and `seconds` by phase (data,
    forward, backward, optimizer, checkpoint)."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    time: float
    val_loss: NotRequired[float]
    mfu: NotRequired[float]
    peak_memory_bytes: NotRequired[int]
    seconds: NotRequired[dict[str, float]]
    checkpoint_stall_s: NotRequired[float]
    checkpoint_s: NotRequired[float]
    checkpoint_step: NotRequired[int]


def append(path: Path, *records: Record) -> None:
    """All of them or none: a disk that fills up in the middle leaves no half line for the next append to continue."""
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            written = file.write(data)
            while written < len(data):  # a disk takes what fits, and fails at the next write
                written += file.write(data[written:])
        except BaseException as error:
            file.truncate(before)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise


class Writer:
    """Appends, at most a twentieth of the time: a bucket that is mounted as a folder writes the whole file anew each time, and
    the steps wait for that. On a disk no record is ever held back.

    What cannot be written is held and tried again with the next record: `problem` has the reason meanwhile. Raising would end
    this rank alone, and leave the others waiting for it in a collective."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: list[Record] = []
        self._due = 0.0
        self.problem: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def append(self, record: Record) -> None:
        self._held.append(record)
        if time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        begin = time.monotonic()
        try:
            append(self._path, *self._held)
        except OSError as error:
            self.problem = error
            return
        self._held.clear()
        self.problem = None
        now = time.monotonic()
        self._due = now + 20 * (now - begin)


def read(path: Path) -> list[Record]:
    return list(Follower(path).new())


def last_saved(path: Path) -> int:
    """The step of the newest checkpoint that the history knows of, 0 for none."""
    return max((record.get("checkpoint_step", 0) for record in read(path)), default=0)


def cut(path: Path, step: int) -> None:
    """Forgets what came after `step`: a run that goes on from there lists those steps again. A file that holds lines which
    cannot be read is kept beside as `metrics.jsonl.damaged`."""
    try:
        before = path.read_bytes()
    except FileNotFoundError:
        return
    lines = before.splitlines(keepends=True)
    kept, unreadable = [], False
    for line in lines:
        record = parse(line)
        if record is None:
            unreadable |= line.endswith(b"\n")  # else a kill has cut it short
        elif record["step"] <= step:
            kept.append(line)
    after = b"".join(kept)
    if after == before:
        return
    if unreadable:
        write_atomic(path.with_name(path.name + ".damaged"), before)
    write_atomic(path, after)


def parse(line: bytes) -> Record | None:
    """None for a line that a kill or a failing disk has left unreadable."""
    try:
        raw = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(raw, dict) or any(not isinstance(raw.get(key), kind) for key, kind in REQUIRED.items()):
        return None
    record: Any = raw
    return cast(Record, record)


class Follower:
    """What was appended since the last look. A file that does not have the last line where it was has been cut: it is read from
    its start. (Its inode would not do: on a mounted bucket each append makes another.)"""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._last = 0, b""

    def new(self) -> Iterator[Record]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._offset, self._last = 0, b""
                file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):  # still being written, or cut off by a kill
                    return
                self._offset, self._last = self._offset + len(line), line
                if record := parse(line):
                    yield record
