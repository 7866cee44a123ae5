"""How far the runs in progress are, read from their folders: `state.json` says what runs, `metrics.jsonl` how it goes.

Nothing is asked of the run itself, so this works from any machine that shares its storage.
"""

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.platform import runs
from strata.platform.errors import UserError
from strata.platform.runs import Run, State

# A driver on another machine cannot be seen, but its run's numbers can: younger than this, it is taken to run.
FRESH_S = 120.0
PACE_STEPS = 50  # over which the time of a step is averaged: enough to hold evaluations and checkpoints too


@dataclass(frozen=True)
class Progress:
    name: str
    step: int
    steps: int
    losses: tuple[float, ...]  # every step's, oldest first
    validation_losses: tuple[float, ...]
    tokens_per_s: float | None
    mfu: float | None
    seconds_left: float | None
    checkpoint_age: float | None  # seconds
    silent_for: float | None  # seconds since the last step; None before the first


class RunWatch:
    """Keeps what it has read of each run: a long run's metrics are some 10 MB, too much to read every second."""

    def __init__(self) -> None:
        self._histories: dict[Path, History] = {}

    def look(self) -> list[Progress]:
        now = time.time()
        every = [(Run(path.parent), state) for path in sorted(runs.runs_dir().glob("*/state.json")) if (state := _state(path))]
        current = [(run, state) for run, state in every if in_progress(run, state, now)]
        self._histories = {run.path: self._histories.get(run.path) or History(run.metrics) for run, _ in current}
        return [self._progress(run, state, now) for run, state in current]

    def _progress(self, run: Run, state: State, now: float) -> Progress:
        history = self._histories[run.path]
        history.read_on()
        last = history.last
        step = int(last.get("step", state.step))
        pace = seconds_per_step([at for at in history.recent if at[1] >= state.pid_created])
        saved = last_checkpoint(run, history)
        return Progress(
            run.name,
            step,
            state.steps,
            tuple(history.losses),
            tuple(history.validation_losses),
            last.get("tokens_per_s"),
            last.get("mfu"),
            None if pace is None else pace * max(0, state.steps - step),
            None if saved is None else max(0.0, now - saved),
            max(0.0, now - last["time"]) if "time" in last else None,
        )


class History:
    """What `metrics.jsonl` has said so far. A file that was cut (a run went back to a checkpoint) is another file, another
    inode: it is read from its start."""

    last: dict[str, Any]
    losses: list[float]
    validation_losses: list[float]
    recent: deque[tuple[int, float]]  # steps and when they ended
    saved_at: float | None

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._offset = 0
        self._forget()

    def read_on(self) -> None:
        for record in self._new():
            self.last = record
            self.losses.append(float(record["loss"]))
            if "val_loss" in record:
                self.validation_losses.append(float(record["val_loss"]))
            if "checkpoint_stall_s" in record:
                self.saved_at = float(record["time"])
            self.recent.append((int(record["step"]), float(record["time"])))

    def _forget(self) -> None:
        self.last, self.losses, self.validation_losses, self.saved_at = {}, [], [], None
        self.recent = deque(maxlen=PACE_STEPS)

    def _new(self) -> Iterator[dict[str, Any]]:
        try:
            file = self._path.open("rb")
        except OSError:  # not there yet, or not for this user
            return
        with file:
            inode = self._path.stat().st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
                self._forget()
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    return
                self._offset += len(line)
                if record := _record(line):
                    yield record


def in_progress(run: Run, state: State, now: float) -> bool:
    if state.status != "running":
        return False
    if state.observed_status() == "running":
        return True
    told = _written_at(run.metrics)
    return told is not None and now - told < FRESH_S


def seconds_per_step(recent: list[tuple[int, float]]) -> float | None:
    """From steps and their times; evaluations and checkpoints between them count, for they will come again."""
    if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
        return None
    (first, begin), (last, end) = recent[0], recent[-1]
    return max(0.0, end - begin) / (last - first)


def last_checkpoint(run: Run, history: History) -> float | None:
    """When a rank last wrote a manifest, which is written last; where checkpoints are kept elsewhere, when steps last stood
    still for one."""
    times = [_written_at(manifest) for manifest in run.checkpoints.glob("step-*/manifest-*.json")]
    return max((written for written in times if written is not None), default=history.saved_at)


def _state(path: Path) -> State | None:
    try:
        return Run(path.parent).state()
    except (UserError, OSError):  # removed while we looked, or damaged: `strata runs` says how
        return None


def _record(line: bytes) -> dict[str, Any] | None:
    """None for a line that a failing disk has left unreadable."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    numbers = isinstance(record, dict) and all(isinstance(record.get(key), int | float) for key in ("step", "loss", "time"))
    return record if numbers else None


def _written_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # not there yet, removed while we looked, or not for this user
        return None
