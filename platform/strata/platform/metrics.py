"""Every metric of the platform, its name written once: what measures, what draws dashboards and what raises alerts refer to
these constants, so that none of them can ask for a series that nobody writes.

Ray exports what its workers measure under the prefix `ray_`: `strata_train_loss` is `ray_strata_train_loss` in Prometheus.
"""

from dataclasses import dataclass
from typing import Literal

RAY_PREFIX = "ray_"


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...]

    @property
    def exported(self) -> str:
        """The name to ask Prometheus for."""
        return RAY_PREFIX + self.name


RUN = ("run",)

TRAIN_STEP = Metric("strata_train_step", "gauge", "Optimizer steps taken", RUN)
TRAIN_LOSS = Metric("strata_train_loss", "gauge", "Loss of the last step, in nats per token", RUN)
TRAIN_VALIDATION_LOSS = Metric("strata_train_validation_loss", "gauge", "Loss of the last evaluation, in nats per token", RUN)
TRAIN_GRADIENT_NORM = Metric("strata_train_gradient_norm", "gauge", "Norm of all gradients before clipping", RUN)
TRAIN_LEARNING_RATE = Metric("strata_train_learning_rate", "gauge", "Learning rate of the last step", RUN)
TRAIN_TOKENS = Metric("strata_train_tokens_total", "counter", "Tokens trained on, over all workers", RUN)
TRAIN_TOKENS_PER_SECOND = Metric("strata_train_tokens_per_second", "gauge", "Tokens a second, over all workers", RUN)
TRAIN_MFU = Metric("strata_train_mfu", "gauge", "Model FLOPs a second over what the devices could reach, 0 to 1", RUN)
TRAIN_STEP_SECONDS = Metric(
    "strata_train_step_seconds",
    "gauge",
    "Time of the last step by phase: data, forward, backward, optimizer, checkpoint",
    ("run", "phase"),
)
TRAIN_PEAK_MEMORY = Metric("strata_train_peak_memory_bytes", "gauge", "Most memory that rank 0 has held so far", RUN)
TRAIN_CHECKPOINT_STALL = Metric(
    "strata_train_checkpoint_stall_seconds", "gauge", "How long steps stood still for the last checkpoint", RUN
)
TRAIN_CHECKPOINT_SAVE = Metric(
    "strata_train_checkpoint_save_seconds", "gauge", "From the step to the last checkpoint whole in storage", RUN
)
TRAIN_CHECKPOINT_BYTES = Metric("strata_train_checkpoint_bytes", "gauge", "Size of the newest whole checkpoint", RUN)
TRAIN_CHECKPOINT_STEP = Metric("strata_train_checkpoint_step", "gauge", "Step of the newest whole checkpoint", RUN)
TRAIN_RESTARTS = Metric("strata_train_restarts_total", "counter", "Times the workers were started again after a loss", RUN)

TRAINING = (
    TRAIN_STEP,
    TRAIN_LOSS,
    TRAIN_VALIDATION_LOSS,
    TRAIN_GRADIENT_NORM,
    TRAIN_LEARNING_RATE,
    TRAIN_TOKENS,
    TRAIN_TOKENS_PER_SECOND,
    TRAIN_MFU,
    TRAIN_STEP_SECONDS,
    TRAIN_PEAK_MEMORY,
    TRAIN_CHECKPOINT_STALL,
    TRAIN_CHECKPOINT_SAVE,
    TRAIN_CHECKPOINT_BYTES,
    TRAIN_CHECKPOINT_STEP,
    TRAIN_RESTARTS,
)
