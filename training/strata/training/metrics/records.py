"""`metrics.jsonl`: one JSON object per step, appended by rank 0 and followed by the driver, on shared storage.

`ray.train.report` could carry records too, but it is a barrier across all ranks, which is too slow for every step.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict, cast

from strata.platform.files import write_atomic

TAIL_BYTES = 1 << 20  # more than any record
REQUIRED = {"step": int, "loss": int | float}


class Record(TypedDict):
    """Record of a step. Optional fields are present where known: `mfu` on devices with a known peak, the checkpoint's times on
    steps that saved one, `checkpoint_step` of the newest complete checkpoint, `peak_memory_bytes` of rank 0, and `seconds` by
    phase (data, forward, backward, optimizer, checkpoint, memory_copy). `plan` is present in a run with a time budget
    (`time_budget.py`)."""

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
    workers: NotRequired[int]
    layout: NotRequired[str]  # in which the step ran, such as `6 workers: data 3 x pipeline 2`
    memory_copy_s: NotRequired[float]  # of the last copy of the state to memory, in the background
    resumed: NotRequired[dict[str, Any]]  # in the first record of restarted workers: step, source and seconds of the recovery
    plan: NotRequired[dict[str, Any]]
    preference: NotRequired[dict[str, float]]  # accuracy, rewards, margin and, for KTO, kl
    distillation: NotRequired[dict[str, float]]  # kl and agreement with the teacher on held-out text, at evaluations
    pictures_per_s: NotRequired[float]  # in a run of a picture model
    drawn: NotRequired[list[Any]]  # pictures of captions; written as a grid instead, whose name is `picture`
    picture: NotRequired[str]
    samples: NotRequired[list[list[int]]]  # tokens after each prompt of `train.samples`; written as text to samples.jsonl instead


def perplexity(record: Record) -> float | None:
    """Perplexity of a validation loss in nats per token. Infinite for a loss whose exponential no float can hold; None without a
    validation loss, and for preferences and pictures, whose loss is not that of tokens."""
    if "val_loss" not in record or "preference" in record or "pictures_per_s" in record:
        return None
    try:
        return math.exp(record["val_loss"])
    except OverflowError:
        return math.inf


def append(path: Path, *records: Mapping[str, object]) -> None:
    """Appends all records or none: a disk that fills up in the middle leaves no partial line."""
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            written = file.write(data)
            while written < len(data):  # a nearly full disk accepts what fits and fails at the next write
                written += file.write(data[written:])
        except BaseException as error:
            file.truncate(before)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise


class Writer:
    """Appends records, with at most 1/20 of the time spent on writes: a bucket mounted as a folder rewrites the whole file at
    each append, and the steps wait for that. On a disk, no record is delayed.

    A failed write is retried with the next record; until then `problem` has the reason. An exception would end this rank alone
    and leave the others waiting in a collective.

    Delayed records are also in `spare`, a file in memory that outlives the process: `restore` recovers them."""

    def __init__(self, path: Path, spare: Path | None = None) -> None:
        self._path, self._spare = path, spare
        self._pending: list[Mapping[str, object]] = []
        self._due = 0.0
        self.problem: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def append(self, *records: Mapping[str, object]) -> None:
        self._pending += records
        if time.monotonic() >= self._due:
            self.flush()
        elif self._spare:
            with suppress(OSError):  # memory is full, or the run has ended and its folder is gone
                append(self._spare, *records)

    def flush(self) -> None:
        if not self._pending:
            return
        begin = time.monotonic()
        try:
            append(self._path, *self._pending)
        except OSError as error:
            self.problem = error
            return
        self._pending.clear()
        self.problem = None
        if self._spare:
            self._spare.unlink(missing_ok=True)
        now = time.monotonic()
        self._due = now + 20 * (now - begin)


def restore(path: Path, spare: Path) -> None:
    """Appends the records that a killed `Writer` had delayed."""
    last = last_step(path)
    if delayed := [record for record in read(spare) if record["step"] > last]:
        append(path, *delayed)
    spare.unlink(missing_ok=True)


def read(path: Path) -> list[Record]:
    return list(Follower(path).new())


def last_step(path: Path) -> int:
    """Last step in the history, 0 for none. Reads only the end of the file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    return next((record["step"] for record in map(parse, reversed(lines)) if record), 0)


def last_saved(path: Path) -> int:
    """Step of the newest checkpoint in the history, 0 for none."""
    return max((record.get("checkpoint_step", 0) for record in read(path)), default=0)


def cut(path: Path, step: int, parsed: Callable[[bytes], Any] | None = None) -> None:
    """Removes records after `step`, for a run that resumes there and records those steps again. A file with unreadable lines,
    for which `parsed` (by default `parse`) returns None, is first copied to `metrics.jsonl.damaged`."""
    try:
        before = path.read_bytes()
    except FileNotFoundError:
        return
    lines = before.splitlines(keepends=True)
    retained, unreadable = [], False
    for line in lines:
        record = (parsed or parse)(line)
        if record is None:
            unreadable |= line.endswith(b"\n")  # otherwise a kill truncated it
        elif record["step"] <= step:
            retained.append(line)
    after = b"".join(retained)
    if after == before:
        return
    if unreadable:
        write_atomic(path.with_name(path.name + ".damaged"), before)
    write_atomic(path, after)


def parse(line: bytes) -> Record | None:
    """Record of a line, None if a kill or a failing disk left it unreadable."""
    try:
        raw = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(raw, dict) or any(not isinstance(raw.get(key), kind) for key, kind in REQUIRED.items()):
        return None
    record: Any = raw
    return cast(Record, record)


class Follower:
    """Reads records appended since the last call. If the last line is no longer where it was, the file has been rewritten and is
    read from the start. (Inodes are no indicator: on a mounted bucket, each append creates a new one.)"""

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
                if not line.endswith(b"\n"):  # still being written, or truncated by a kill
                    return
                self._offset, self._last = self._offset + len(line), line
                if record := parse(line):
                    yield record
