"""A run's numbers as Prometheus series, by way of Ray: workers hand them to the Ray agent of their node, which exports them
with the prefix `ray_` and labels of its own (node, worker) beside ours.

Outside a Ray cluster the same calls go nowhere, silently.
"""

from typing import Any

from strata.platform import metrics
from strata.platform.metrics import Metric
from strata.training.records import Record

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


class Telemetry:
    """Rank 0's alone: the numbers in a record are those of all ranks already.

    A worker that was started again exports new series (Ray labels them by worker), so `restarts` is the count so far and not
    one more: a counter's first value is not seen as an increase, `max by (run)` of it is the right number.
    """

    def __init__(self, run: str, tokens_per_step: int, restarts: int = 0) -> None:
        from ray.util.metrics import Counter, Gauge

        kinds = {"gauge": Gauge, "counter": Counter}
        self._tokens_per_step = tokens_per_step
        self._series: dict[Metric, Any] = {
            metric: kinds[metric.kind](metric.name, metric.help, metric.labels).set_default_tags({"run": run})
            for metric in metrics.TRAINING
        }
        if restarts:
            self._series[metrics.TRAIN_RESTARTS].inc(restarts)

    def record(self, record: Record) -> None:
        """Once a step."""
        for key, metric in GAUGES.items():
            value = record.get(key)
            if value is not None:
                self._series[metric].set(value)
        for phase, seconds in record.get("seconds", {}).items():
            self._series[metrics.TRAIN_STEP_SECONDS].set(seconds, {"phase": phase})
        self._series[metrics.TRAIN_TOKENS].inc(self._tokens_per_step)

    def saved(self, step: int, size: int) -> None:
        """When a checkpoint is whole in storage, which with asynchronous uploads is some steps after its own."""
        self._series[metrics.TRAIN_CHECKPOINT_STEP].set(step)
        self._series[metrics.TRAIN_CHECKPOINT_BYTES].set(size)
