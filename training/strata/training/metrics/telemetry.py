"""A run's numbers as Prometheus series, by way of Ray: workers hand them to the Ray agent of their node, which exports them
with the prefix `ray_` and labels of its own (node, worker) beside ours.

Ray forgets a gauge some 20 seconds after it was last set, which is right for a worker that died and wrong for one that hangs:
whoever looks for a run that makes no steps has to find it. So a thread sets every gauge again at its last value, for as long as
the worker lives. (Counters stay, and what was counted last goes out even when the worker is killed by Ray.)

Outside a Ray cluster the same calls go nowhere, silently.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Self

from strata.platform import metrics
from strata.platform.metrics import Metric
from strata.training.metrics.records import Record

GAUGES = {
    "step": metrics.TRAIN_STEP,
    "loss": metrics.TRAIN_LOSS,
    "val_loss": metrics.TRAIN_VALIDATION_LOSS,
    "grad_norm": metrics.TRAIN_GRADIENT_NORM,
    "lr": metrics.TRAIN_LEARNING_RATE,
    "tokens_per_s": metrics.TRAIN_TOKENS_PER_SECOND,
    "mfu": metrics.TRAIN_MFU,
    "peak_memory_bytes": metrics.TRAIN_PEAK_MEMORY,
    "checkpoint_stall_s": metrics.TRAIN_CHECKPOINT_STALL,
    "checkpoint_s": metrics.TRAIN_CHECKPOINT_SAVE,
}
REPEAT_S = 5.0  # Ray hands gauges on every 10 seconds


def checkpoint_failures(run: str) -> Callable[[], None]:
    """To be called by any rank whose part of a checkpoint could not be written: the others may never hear of it."""
    from ray.util.metrics import Counter

    metric = metrics.TRAIN_CHECKPOINT_FAILURES
    counter = Counter(metric.name, metric.help, metric.labels).set_default_tags({"run": run})
    return lambda: counter.inc(1)


class Telemetry:
    """Rank 0's alone: the numbers in a record are those of all ranks already. To be entered while the worker trains.

    A worker that was started again exports new series (Ray labels them by worker), so `restarts` is the count so far and not
    one more: a counter's first value is not seen as an increase, `max by (run)` of it is the right number.
    """

    def __init__(self, run: str, steps: int, tokens_per_step: int, restarts: int = 0) -> None:
        from ray.util.metrics import Counter, Gauge

        kinds = {"gauge": Gauge, "counter": Counter}
        self._tokens_per_step = tokens_per_step
        self._series: dict[Metric, Any] = {
            metric: kinds[metric.kind](metric.name, metric.help, metric.labels).set_default_tags({"run": run})
            for metric in metrics.TRAINING
            if metric is not metrics.TRAIN_CHECKPOINT_FAILURES
        }
        self._last: dict[tuple[Metric, str | None], float] = {}
        self._lock = threading.Lock()  # so that no old value is set after a new one
        self._ended = threading.Event()
        self._phases: set[str] = set()
        self._set(metrics.TRAIN_STEPS_PLANNED, steps)
        self._set(metrics.TRAIN_CHECKPOINT_TIME, time.time())
        if restarts:
            self._series[metrics.TRAIN_RESTARTS].inc(restarts)

    def __enter__(self) -> Self:
        threading.Thread(target=self._repeat, name="telemetry", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def record(self, record: Record) -> None:
        """Once a step."""
        for key, metric in GAUGES.items():
            value: Any = record.get(key)
            if value is not None:
                self._set(metric, value)
        seconds = record.get("seconds", {})
        self._phases |= seconds.keys()
        for phase in self._phases:  # one that this step did not have, such as a checkpoint, took no time in it
            self._set(metrics.TRAIN_STEP_SECONDS, seconds.get(phase, 0.0), phase)
        self._series[metrics.TRAIN_TOKENS].inc(self._tokens_per_step)

    def not_finite(self) -> None:
        """Of the step that ends the run: counted, for Ray passes on no gauge that is NaN or infinite."""
        self._series[metrics.TRAIN_NOT_FINITE].inc(1)

    def saved(self, step: int, size: int, at: float) -> None:
        """When a checkpoint is whole in storage, which with asynchronous uploads is some steps after its own."""
        self._set(metrics.TRAIN_CHECKPOINT_STEP, step)
        self._set(metrics.TRAIN_CHECKPOINT_BYTES, size)
        self._set(metrics.TRAIN_CHECKPOINT_TIME, at)

    def _set(self, metric: Metric, value: float, phase: str | None = None) -> None:
        with self._lock:
            self._last[metric, phase] = value
            self._give(metric, value, phase)

    def _give(self, metric: Metric, value: float, phase: str | None) -> None:
        self._series[metric].set(value, None if phase is None else {"phase": phase})

    def _repeat(self) -> None:
        while not self._ended.wait(REPEAT_S):
            with self._lock:
                for (metric, phase), value in self._last.items():
                    self._give(metric, value, phase)
