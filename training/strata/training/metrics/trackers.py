"""Forwards a run's records to experiment trackers (`train.trackers`).

A tracker cannot stop or delay training: each has its own thread and a bounded queue. One that fails prints a line and is
switched off.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from typing import Any, Self

from strata.platform.errors import UserError, shown
from strata.platform.runs import Run
from strata.training.metrics.records import Record, perplexity
from strata.training.metrics.tracker_clients import Client, Point, open_client

# Module and package of each tracker. mlflow-skinny is MLflow's client without its server.
PACKAGES = {
    "tensorboard": ("tensorboardX", "tensorboardX"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
FORWARDED = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "mfu")
MOST_QUEUED = 10_000  # records; beyond, new ones are dropped
CLOSE_S = 30.0  # time for all trackers to send their last records
SHOWN = 200  # characters of a tracker's error


def require_installed(names: Sequence[str]) -> None:
    """Raises UserError for a tracker whose package is missing."""
    for name in names:
        module, package = PACKAGES[name]
        if find_spec(module) is None:
            cause = f"train.trackers has {name}, but the package {module} is not installed."
            raise UserError(cause, f"Install it with: uv pip install {package}. Or remove {name} from train.trackers.")


class Trackers:
    """Context manager around the training of rank 0. A tracker opens with the first record."""

    def __init__(
        self,
        run: Run,
        names: Sequence[str],
        say: Callable[[str], None] = print,
        opened: Callable[[str, Run, int], Client] = open_client,
    ) -> None:
        self._feeds = [_Feed(name, run, say, opened) for name in dict.fromkeys(names)]
        self._say = say

    def __enter__(self) -> Self:
        for feed in self._feeds:
            feed.start()
        return self

    def record(self, record: Record, samples: Mapping[str, str] | None = None) -> None:
        """Queues a step's record, and continuations of prompts. Never blocks."""
        point = Point(record["step"], record["time"], values(record), samples or {})
        for feed in self._feeds:
            feed.put(point)

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
            if feed.is_alive():
                self._say(
                    f"Tracker {feed.name}: the last steps were not sent within {CLOSE_S:.0f} s. The run does not wait for it."
                )


def values(record: Record) -> dict[str, float]:
    """Values of a record for a tracker. Unknown and non-finite ones are left out."""
    raw: dict[str, Any] = {name: record.get(name) for name in FORWARDED}
    raw["perplexity"] = perplexity(record)
    raw |= {f"preference/{name}": value for name, value in record.get("preference", {}).items()}
    raw |= {f"distillation/{name}": value for name, value in record.get("distillation", {}).items()}
    if "peak_memory_bytes" in record:
        raw["peak_memory_gib"] = record["peak_memory_bytes"] / 2**30
    return {name: float(value) for name, value in raw.items() if value is not None and math.isfinite(value)}


class _Feed(threading.Thread):
    """Queue and thread of one tracker. A daemon: a call that hangs does not outlive the process."""

    def __init__(self, name: str, run: Run, say: Callable[[str], None], opened: Callable[[str, Run, int], Client]) -> None:
        super().__init__(name=name, daemon=True)
        self._run, self._say, self._opened = run, say, opened
        self._queue: SimpleQueue[Point | None] = SimpleQueue()  # None ends it
        self._off = self._dropped = self._ended = False

    def put(self, point: Point) -> None:
        if self._off:
            return
        if self._queue.qsize() < MOST_QUEUED:
            self._queue.put(point)
        elif not self._dropped:
            self._dropped = True
            self._say(f"Tracker {self.name} is {MOST_QUEUED} steps behind; steps that it has no space for are not sent.")

    def end(self) -> None:
        self._queue.put(None)

    def run(self) -> None:
        try:
            points = self._next()
            if not points:
                return
            client = self._opened(self.name, self._run, points[0].step - 1)
            while points:
                client.log(points)
                points = self._next()
            client.close()
        except BaseException as error:  # a library may also raise SystemExit
            self._off = True
            reason = shown(f"{type(error).__name__}: {error}", SHOWN).removesuffix(":")
            self._say(f"Tracker {self.name} failed and is switched off; training continues. {reason}")

    def _next(self) -> list[Point]:
        """All points in the queue, at least one; none after the end."""
        if self._ended:
            return []
        points: list[Point] = []
        waiting = self._queue.get()
        try:
            while waiting is not None:
                points.append(waiting)
                waiting = self._queue.get_nowait()
        except Empty:
            return points
        self._ended = True
        return points
