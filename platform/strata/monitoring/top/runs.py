"""Progress of training runs, read from `state.json` and `metrics.jsonl` in their folders.

It needs no connection to the run, so it works on any machine that shares the storage.
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

# A driver on another machine is not visible here. Its run counts as running if its metrics are newer than this.
FRESH_S = 120.0
PACE_STEPS = 50  # window of the mean step time; long enough to include evaluations and checkpoints


@dataclass(frozen=True)
class Progress:
    name: str
    step: int
    steps: int
    losses: tuple[float, ...]  # of every step, oldest first
    validation_losses: tuple[float, ...]
    tokens_per_s: float | None
    mfu: float | None
    seconds_left: float | None
    checkpoint_age: float | None  # seconds
    silent_for: float | None  # seconds since the last step; None before the first


class RunWatch:
    """Polls all runs and caches their histories: the metrics of a long run are about 10 MB, too much to read every second."""

    def __init__(self) -> None:
        self._histories: dict[Path, History] = {}

    def poll(self) -> list[Progress]:
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
    """Records of `metrics.jsonl` read so far. A run that resumes from a checkpoint replaces the file by a shorter version with
    a new inode, which is read from its start."""

    last: dict[str, Any]
    losses: list[float]
    validation_losses: list[float]
    recent: deque[tuple[int, float]]  # (step, end time)
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
        except OSError:  # missing or not readable
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
    written = _written_at(run.metrics)
    return written is not None and now - written < FRESH_S


def seconds_per_step(recent: list[tuple[int, float]]) -> float | None:
    """Mean time of a step, including evaluations and checkpoints, because the remaining steps will have them too."""
    if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
        return None
    (first, begin), (last, end) = recent[0], recent[-1]
    return max(0.0, end - begin) / (last - first)


def last_checkpoint(run: Run, history: History) -> float | None:
    """Time of the newest checkpoint manifest, which a rank writes last. If checkpoints are stored elsewhere, the time of the
    last step that stalled for a checkpoint."""
    times = [_written_at(manifest) for manifest in run.checkpoints.glob("step-*/manifest-*.json")]
    return max((written for written in times if written is not None), default=history.saved_at)


def _state(path: Path) -> State | None:
    try:
        return Run(path.parent).state()
    except (UserError, OSError):  # removed meanwhile, or damaged, which `strata runs` reports
        return None


def _record(line: bytes) -> dict[str, Any] | None:
    """Parses a line. Returns None if it is damaged, for example by a failing disk."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    numbers = isinstance(record, dict) and all(isinstance(record.get(key), int | float) for key in ("step", "loss", "time"))
    return record if numbers else None


def _written_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # missing, removed meanwhile, or not readable
        return None
