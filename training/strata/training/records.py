"""`metrics.jsonl`: one JSON object a step, appended by rank 0 and followed by the driver, on storage they share.

`ray.train.report` would carry these too, but it is a barrier for all ranks: too slow for every step of a live display.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

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


def append(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[Record]:
    return list(Follower(path).new())


def cut(path: Path, step: int) -> None:
    """Forgets what came after `step`: a run that goes on from there lists those steps again."""
    kept = [record for record in read(path) if record["step"] <= step]
    write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept))


class Follower:
    """What was appended since the last look. A file that was cut is another file (another inode): it is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._offset = 0

    def new(self) -> Iterator[Record]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            inode = self._path.stat().st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written, or cut off by a kill
                    return
                self._offset += len(line)
                yield json.loads(line)
