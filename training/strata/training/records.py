"""`metrics.jsonl`: one JSON object a step, appended by rank 0 and followed by the driver, on storage they share.

`ray.train.report` would carry these too, but it is a barrier for all ranks: too slow for every step of a live display.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NotRequired, Self, TypedDict

from strata.platform.files import write_atomic


class Record(TypedDict):
    """What is not required is there where it is known: `mfu` on devices whose peak is, the checkpoint's times on steps that
    saved one, `peak_memory_bytes` of rank 0, and `seconds` by phase (data, forward, backward, optimizer, checkpoint)."""

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


def append(path: Path, *records: Record) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


class Writer:
    """Appends, at most a twentieth of the time: a bucket that is mounted as a folder writes the whole file anew each time, and
    the steps wait for that. On a disk no record is ever held back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: list[Record] = []
        self._due = 0.0

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
        append(self._path, *self._held)
        self._held.clear()
        now = time.monotonic()
        self._due = now + 20 * (now - begin)


def read(path: Path) -> list[Record]:
    return list(Follower(path).new())


def cut(path: Path, step: int) -> None:
    """Forgets what came after `step`: a run that goes on from there lists those steps again."""
    kept = [record for record in read(path) if record["step"] <= step]
    write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept))


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
                yield json.loads(line)
