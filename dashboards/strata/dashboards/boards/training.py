"""Whether runs learn, how fast, and how safe what they learned is."""

from strata.dashboards.board import Board, even, row
from strata.dashboards.panels import Line, bars, lines
from strata.dashboards.promql import highest, or_zero, per_second
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
        "Optimizer steps taken, over the steps that the run will take in all.",
        Unit.RATIO,
        Line(f"{of(metrics.TRAIN_STEP)} / {of(metrics.TRAIN_STEPS_PLANNED)}", EACH),
        top=1,
    ).wide(8),
    lines(
        "Step", "Optimizer steps taken; a flat line is a run that stands still.", Unit.STEPS, Line(of(metrics.TRAIN_STEP), EACH)
    ).wide(8),
    lines(
        "Restarts",
        "Times the workers were started again after a loss, and losses that were not finite, since the run began.",
        Unit.COUNT,
        Line(count(metrics.TRAIN_RESTARTS), f"{EACH} restarts"),
        Line(count(metrics.TRAIN_NOT_FINITE), f"{EACH} not finite"),
        limits=ANY,
    ).wide(8),
)

LEARNING = row(
    "Learning",
    lines("Loss", "Loss of each step, in nats per token.", Unit.NATS, Line(of(metrics.TRAIN_LOSS), EACH), logarithmic=True),
    lines(
        "Validation loss",
        "Loss of the last evaluation; rising while the loss falls is overfitting.",
        Unit.NATS,
        Line(of(metrics.TRAIN_VALIDATION_LOSS), EACH),
        logarithmic=True,
    ),
    lines(
        "Gradient norm",
        "Norm of all gradients before clipping; spikes come before a loss that diverges.",
        Unit.NUMBER,
        Line(of(metrics.TRAIN_GRADIENT_NORM), EACH),
        logarithmic=True,
    ),
    lines("Learning rate", "Learning rate of each step.", Unit.NUMBER, Line(of(metrics.TRAIN_LEARNING_RATE), EACH)),
)

SPEED = row(
    "Speed",
    lines(
        "Tokens a second",
        "Over all workers: as the last step had it, and as the count of tokens grows, stalls included.",
        Unit.TOKENS_PER_SECOND,
        Line(of(metrics.TRAIN_TOKENS_PER_SECOND), f"{EACH} step"),
        Line(per_second(metrics.TRAIN_TOKENS, *RUN), f"{EACH} with stalls"),
    ),
    lines(
        "MFU",
        "The model's FLOPs a second over what the devices could reach.",
        Unit.RATIO,
        Line(of(metrics.TRAIN_MFU), EACH),
    ),
    lines(
        "Step time by phase",
        "Where the time of a step goes: data, forward, backward, optimizer, checkpoint.",
        Unit.SECONDS,
        Line(highest(metrics.TRAIN_STEP_SECONDS, *RUN, "phase"), f"{EACH} {{{{phase}}}}"),
        stacked=True,
    ),
    lines("Peak memory", "Most memory that rank 0 has held so far.", Unit.BYTES, Line(of(metrics.TRAIN_PEAK_MEMORY), EACH)),
)

CHECKPOINTS = row(
    "Checkpoints",
    *even(
        8,
        (
            lines(
                "Age of the newest",
                "Time since a checkpoint was last whole in storage: what a lost worker would cost now.",
                Unit.SECONDS,
                Line(f"time() - {of(metrics.TRAIN_CHECKPOINT_TIME)}", EACH),
                limits=CHECKPOINT_AGE,
            ),
            lines(
                "Steps since the newest",
                "Steps that a lost worker would have to take again.",
                Unit.STEPS,
                Line(f"{of(metrics.TRAIN_STEP)} - ({count(metrics.TRAIN_CHECKPOINT_STEP)})", EACH),
            ),
            lines(
                "Failures",
                "Checkpoints that could not be written, since the workers began.",
                Unit.COUNT,
                Line(count(metrics.TRAIN_CHECKPOINT_FAILURES), EACH),
                limits=ANY,
            ),
            lines(
                "Stall",
                "How long steps stood still for the last checkpoint.",
                Unit.SECONDS,
                Line(of(metrics.TRAIN_CHECKPOINT_STALL), EACH),
            ),
            lines(
                "Save time",
                "From the step to its checkpoint whole in storage.",
                Unit.SECONDS,
                Line(of(metrics.TRAIN_CHECKPOINT_SAVE), EACH),
            ),
            lines("Size", "Bytes of the newest whole checkpoint.", Unit.BYTES, Line(of(metrics.TRAIN_CHECKPOINT_BYTES), EACH)),
        ),
    ),
)

BOARD = Board(
    uid="strata-training",
    title="Strata: Training",
    description="Runs: whether they learn, how fast, where a step's time goes, and how old their checkpoints are.",
    variables=("cluster", "run"),
    rows=(SUMMARY, LEARNING, SPEED, CHECKPOINTS),
    since="now-3h",
)
