"""Training board: loss, throughput, step time and checkpoints of runs."""

from strata.dashboards.board import Board, even, row
from strata.dashboards.boards.annotations import DEPLOYMENTS, WORKER_RESTARTS
from strata.dashboards.panels import Line, bars, lines
from strata.dashboards.promql import highest, most, or_zero, per_second
from strata.dashboards.style import ANY, CHECKPOINT_AGE, Unit
from strata.platform import metrics

RUN = ("cluster", "run")
EACH = "{{run}}"


def of(metric: metrics.Metric) -> str:
    return highest(metric, *RUN)


def count(metric: metrics.Metric) -> str:
    return or_zero(of(metric), of(metrics.TRAIN_STEP), *RUN)


SUMMARY = row(
    "Now",
    bars(
        "Progress",
        "Completed optimizer steps over planned steps.",
        Unit.RATIO,
        Line(f"{of(metrics.TRAIN_STEP)} / {of(metrics.TRAIN_STEPS_PLANNED)}", EACH),
        top=1,
    ).wide(6),
    lines("Step", "Completed optimizer steps. A flat line is a stalled run.", Unit.STEPS, Line(of(metrics.TRAIN_STEP), EACH))
    .wide(6)
    .about("StrataTrainingStalled", "StrataCollectiveHung"),
    lines(
        "Workers",
        "Workers of the current layout. It changes when an elastic run loses a node or grows.",
        Unit.COUNT,
        Line(of(metrics.TRAIN_WORKERS), EACH),
    ).wide(6),
    lines(
        "Restarts",
        "Restarts of the workers after a failure, and losses that were not finite, since the run began.",
        Unit.COUNT,
        Line(count(metrics.TRAIN_RESTARTS), f"{EACH} restarts"),
        Line(count(metrics.TRAIN_NOT_FINITE), f"{EACH} not finite"),
        limits=ANY,
    )
    .wide(6)
    .about("StrataWorkersRestarted", "StrataWorkersRestartLoop", "StrataLossNotFinite"),
)

LEARNING = row(
    "Learning",
    lines("Loss", "Loss of each step, in nats per token.", Unit.NATS, Line(of(metrics.TRAIN_LOSS), EACH), logarithmic=True).about(
        "StrataLossSpiking"
    ),
    lines(
        "Validation loss",
        "Loss of the last evaluation. It rises while the training loss falls in case of overfitting.",
        Unit.NATS,
        Line(of(metrics.TRAIN_VALIDATION_LOSS), EACH),
        logarithmic=True,
    ),
    lines(
        "Gradient norm",
        "Global gradient norm before clipping. Spikes precede a diverging loss.",
        Unit.NUMBER,
        Line(of(metrics.TRAIN_GRADIENT_NORM), EACH),
        logarithmic=True,
    ),
    lines("Learning rate", "Learning rate of each step.", Unit.NUMBER, Line(of(metrics.TRAIN_LEARNING_RATE), EACH)),
)

SPEED = row(
    "Throughput",
    lines(
        "Tokens per second",
        "Over all workers: of the last step, and from the token counter, which includes stalls.",
        Unit.TOKENS_PER_SECOND,
        Line(of(metrics.TRAIN_TOKENS_PER_SECOND), f"{EACH} step"),
        Line(per_second(metrics.TRAIN_TOKENS, *RUN), f"{EACH} with stalls"),
    ),
    lines(
        "MFU",
        "Model FLOPs utilization: model FLOP/s over the peak of the devices.",
        Unit.RATIO,
        Line(of(metrics.TRAIN_MFU), EACH),
    ).about("StrataMfuDropped"),
    lines(
        "Step time by phase",
        "Step time by phase: data, forward, backward, optimizer, checkpoint.",
        Unit.SECONDS,
        Line(highest(metrics.TRAIN_STEP_SECONDS, *RUN, "phase"), f"{EACH} {{{{phase}}}}"),
        stacked=True,
    ),
    bars(
        "Slowest ranks",
        "Data and forward time of a rank's last step. All ranks wait for the slowest one.",
        Unit.SECONDS,
        Line(most(highest(metrics.TRAIN_RANK_SECONDS, *RUN, "rank")), f"{EACH} rank {{{{rank}}}}"),
    ).about("StrataStraggler"),
    lines("Peak memory", "Peak memory of rank 0.", Unit.BYTES, Line(of(metrics.TRAIN_PEAK_MEMORY), EACH)).wide(24),
)

FAULTS = row(
    "Watchdog",
    lines(
        "Faults by kind",
        "Hangs, deaths, corrupted replicas and spikes that the watchdog has named, since the command started.",
        Unit.COUNT,
        Line(highest(metrics.TRAIN_FAULTS, *RUN, "kind"), f"{EACH} {{{{kind}}}}"),
        limits=ANY,
    ).about("StrataTrainingFault"),
    bars(
        "Slow ranks",
        "Data and forward time of ranks named as slow, over the median of the other ranks of their pipeline stage.",
        Unit.NUMBER,
        Line(most(highest(metrics.TRAIN_RANK_SLOWNESS, *RUN, "rank", "host")), f"{EACH} rank {{{{rank}}}} {{{{host}}}}"),
    ).about("StrataStraggler"),
)

CHECKPOINTS = row(
    "Checkpoints",
    *even(
        8,
        (
            lines(
                "Checkpoint age",
                "Time since the last complete checkpoint in storage: the work that a failure would lose.",
                Unit.SECONDS,
                Line(f"time() - {of(metrics.TRAIN_CHECKPOINT_TIME)}", EACH),
                limits=CHECKPOINT_AGE,
            ).about("StrataCheckpointTooOld"),
            lines(
                "Steps since the last checkpoint",
                "Steps that a failure would repeat.",
                Unit.STEPS,
                Line(f"{of(metrics.TRAIN_STEP)} - ({count(metrics.TRAIN_CHECKPOINT_STEP)})", EACH),
            ),
            lines(
                "Failures",
                "Checkpoints that could not be written, since the workers started.",
                Unit.COUNT,
                Line(count(metrics.TRAIN_CHECKPOINT_FAILURES), EACH),
                limits=ANY,
            ).about("StrataCheckpointFailing"),
            lines(
                "Stall",
                "Time that the last checkpoint stalled training.",
                Unit.SECONDS,
                Line(of(metrics.TRAIN_CHECKPOINT_STALL), EACH),
            ),
            lines(
                "Save time",
                "From the step to its complete checkpoint in storage.",
                Unit.SECONDS,
                Line(of(metrics.TRAIN_CHECKPOINT_SAVE), EACH),
            ),
            lines("Size", "Bytes of the last complete checkpoint.", Unit.BYTES, Line(of(metrics.TRAIN_CHECKPOINT_BYTES), EACH)),
        ),
    ),
    collapsed=True,
)

BOARD = Board(
    uid="strata-training",
    title="Strata: Training",
    description="Runs: loss, throughput, step time by phase and checkpoints.",
    variables=("cluster", "ray_cluster", "team", "run"),
    rows=(SUMMARY, LEARNING, SPEED, FAULTS, CHECKPOINTS),
    since="now-3h",
    annotations=(WORKER_RESTARTS, DEPLOYMENTS),
)
