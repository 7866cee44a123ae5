"""Exports a run's metrics to Prometheus through Ray. Workers send them to the Ray agent of their node, which exports them with
the prefix `ray_` and adds its own labels (node, worker).

Ray drops a gauge about 20 seconds after it was last set. That is right for a worker that died and wrong for one that hangs: a
run that makes no steps must remain visible. So a thread sets every gauge again to its last value while the worker lives.
(Counters persist, and their last value is exported even if Ray kills the worker.)

Outside a Ray cluster the calls have no effect.
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
    "workers": metrics.TRAIN_WORKERS,
    "peak_memory_bytes": metrics.TRAIN_PEAK_MEMORY,
    "checkpoint_stall_s": metrics.TRAIN_CHECKPOINT_STALL,
    "checkpoint_s": metrics.TRAIN_CHECKPOINT_SAVE,
}
OF_EVERY_RANK = (metrics.TRAIN_CHECKPOINT_FAILURES, metrics.TRAIN_RANK_SECONDS)
OF_THE_DRIVER = (metrics.TRAIN_FAULTS, metrics.TRAIN_RANK_SLOWNESS)
REPEAT_S = 5.0  # Ray exports gauges every 10 seconds


def checkpoint_failures(run: str) -> Callable[[], None]:
    """Counter to increment on any rank that fails to write its part of a checkpoint: the other ranks may not notice."""
    from ray.util.metrics import Counter

    metric = metrics.TRAIN_CHECKPOINT_FAILURES
    counter = Counter(metric.name, metric.help, metric.labels).set_default_tags({"run": run})
    return lambda: counter.inc(1)


def rank_seconds(run: str, rank: int, stage: int) -> Callable[[Record], None]:
    """Gauge to set on every rank after a step: one series per rank, from times that the rank measures anyway. It is not repeated:
    the series of a rank that hangs ends."""
    from ray.util.metrics import Gauge

    metric = metrics.TRAIN_RANK_SECONDS
    tags = {"run": run, "rank": str(rank), "stage": str(stage)}
    gauge = Gauge(metric.name, metric.help, metric.labels).set_default_tags(tags)

    def record(record: Record) -> None:
        seconds = record.get("seconds", {})
        gauge.set(seconds.get("data", 0.0) + seconds.get("forward", 0.0))

    return record


class Telemetry:
    """Context manager that exports metrics while rank 0 trains; its records already cover all ranks.

    A restarted worker exports new series, because Ray labels them by worker. So `restarts` is the total so far rather than an
    increment: Prometheus does not see a counter's first value as an increase, and `max by (run)` is the right number.
    """

    def __init__(self, run: str, steps: int, tokens_per_step: int, restarts: int = 0) -> None:
        from ray.util.metrics import Counter, Gauge

        kinds = {"gauge": Gauge, "counter": Counter}
        self._tokens_per_step = tokens_per_step
        self._series: dict[Metric, Any] = {
            metric: kinds[metric.kind](metric.name, metric.help, metric.labels).set_default_tags({"run": run})
            for metric in metrics.TRAINING
            if metric not in (*OF_EVERY_RANK, *OF_THE_DRIVER)
        }
        self._last: dict[tuple[Metric, str | None], float] = {}
        self._lock = threading.Lock()  # an old value must not overwrite a new one
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
        """Exports a step's record."""
        for key, metric in GAUGES.items():
            value: Any = record.get(key)
            if value is not None:
                self._set(metric, value)
        if "plan" in record:
            self._set(metrics.TRAIN_STEPS_PLANNED, record["plan"]["steps"])
        seconds = record.get("seconds", {})
        self._phases |= seconds.keys()
        for phase in self._phases:  # 0 for a phase that this step lacks, such as a checkpoint
            self._set(metrics.TRAIN_STEP_SECONDS, seconds.get(phase, 0.0), phase)
        self._series[metrics.TRAIN_TOKENS].inc(self._tokens_per_step)

    def not_finite(self) -> None:
        """Counts a step with a non-finite loss or gradient, which ends the run. Ray exports no NaN or infinite gauges."""
        self._series[metrics.TRAIN_NOT_FINITE].inc(1)

    def saved(self, step: int, size: int, at: float) -> None:
        """Exports a checkpoint that is complete in storage. With asynchronous uploads that is some steps after its own."""
        self._set(metrics.TRAIN_CHECKPOINT_STEP, step)
        self._set(metrics.TRAIN_CHECKPOINT_BYTES, size)
        self._set(metrics.TRAIN_CHECKPOINT_TIME, at)

    def _set(self, metric: Metric, value: float, phase: str | None = None) -> None:
        with self._lock:
            self._last[metric, phase] = value
            self._export(metric, value, phase)

    def _export(self, metric: Metric, value: float, phase: str | None) -> None:
        self._series[metric].set(value, None if phase is None else {"phase": phase})

    def _repeat(self) -> None:
        while not self._ended.wait(REPEAT_S):
            with self._lock:
                for (metric, phase), value in self._last.items():
                    self._export(metric, value, phase)
