"""One page for whoever is woken up: what is wrong, how bad, and which board to open next."""

from strata.dashboards import series
from strata.dashboards.board import Board, even, row
from strata.dashboards.panels import Line, Panel, alert_list, bars, lines, number, table_of
from strata.dashboards.promql import burn, highest, or_zero, per_second, quantile, select, summed
from strata.dashboards.style import ANSWERING, ANY, BURN, BUSY, CHECKPOINT_AGE, FIRST_TOKEN, FULL, HOT, INTER_TOKEN, MISSED, Unit
from strata.platform import metrics

GPU = ("cluster", "node", "gpu", "name")
RUN = ("cluster", "run")
MODEL = ("cluster", "model")
FIRING = ('alertstate="firing"',)
ANSWERED = per_second(metrics.SERVE_REQUESTS, *MODEL)
FAILED = per_second(metrics.SERVE_REQUESTS, *MODEL, matchers=('status=~"5.."',))
EACH_GPU = "{{node}} gpu {{gpu}}"


def of(metric: metrics.Metric) -> str:
    return highest(metric, *RUN)


def burning(title: str, what: str, misses: dict[str, series.Series]) -> Panel:
    each = (Line(burn(misses[window]), f"{{{{model}}}} over {window}") for window in series.WINDOWS)
    return lines(
        title,
        f"How many times faster than allowed {what} miss their objective; both 5m and 1h above 14.4 wake someone.",
        Unit.BURN,
        *each,
        limits=BURN,
    )


ALERTS = row(
    "What is firing",
    table_of(
        "Alerts",
        "Every alert that fires now, with its labels; none is a good sign.",
        select(series.ALERTS, *FIRING),
    ).wide(12),
    alert_list("In Grafana", "Alerts of rules that Grafana itself evaluates, pending ones too.").wide(6),
    lines(
        "Alerts by severity",
        "How many alerts fired, over time.",
        Unit.COUNT,
        Line(f"count by (severity) ({select(series.ALERTS, *FIRING)}) or on () vector(0)", "{{severity}}"),
        limits=ANY,
    ).wide(6),
)

ENDPOINT = row(
    "Endpoint",
    *even(
        4,
        (
            number(
                "Gateways up",
                "Gateways that answer clients.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_REPLICAS, "role", matchers=('role="gateway"',)), "up"),
                ANSWERING,
                empty="none",
            ),
            number(
                "Decode up",
                "Engines that decode; without one nothing is answered.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_REPLICAS, "role", matchers=('role="decode"',)), "up"),
                ANSWERING,
                empty="none",
            ),
            number(
                "Server errors",
                "Share of requests answered with a 5xx status.",
                Unit.RATIO,
                Line(f"(sum({FAILED}) or vector(0)) / sum({ANSWERED})", "5xx"),
                MISSED,
                empty="no requests",
            ),
            number(
                "First token, p99",
                "The time that 99 of 100 first tokens take at most; the objective is 2 s.",
                Unit.SECONDS,
                Line(quantile(0.99, metrics.SERVE_FIRST_TOKEN), "p99"),
                FIRST_TOKEN,
            ),
            number(
                "Between tokens, p99",
                "The time that 99 of 100 gaps between tokens take at most; the objective is 0.1 s.",
                Unit.SECONDS,
                Line(quantile(0.99, metrics.SERVE_INTER_TOKEN), "p99"),
                INTER_TOKEN,
            ),
            number(
                "KV cache, fullest",
                "Share of KV blocks that requests hold, on the fullest engine.",
                Unit.RATIO,
                Line(f"max({highest(metrics.SERVE_KV_USAGE, *MODEL)})", "in use"),
                FULL,
            ),
        ),
    ),
    burning("First tokens: budget burn", "first tokens", series.FIRST_TOKEN_MISSES),
    burning("Gaps: budget burn", "gaps between tokens", series.INTER_TOKEN_MISSES),
)

RUNS = row(
    "Runs",
    *even(
        6,
        (
            bars(
                "Progress",
                "Steps taken over steps planned; a run that has ended leaves the list.",
                Unit.RATIO,
                Line(f"{of(metrics.TRAIN_STEP)} / {of(metrics.TRAIN_STEPS_PLANNED)}", "{{run}}"),
                top=1,
            ),
            lines(
                "Tokens a second",
                "As the count of tokens grows; at 0 the run stands still.",
                Unit.TOKENS_PER_SECOND,
                Line(per_second(metrics.TRAIN_TOKENS, *RUN), "{{run}}"),
            ),
            lines(
                "Checkpoint age",
                "Time since a checkpoint was last whole in storage.",
                Unit.SECONDS,
                Line(f"time() - {of(metrics.TRAIN_CHECKPOINT_TIME)}", "{{run}}"),
                limits=CHECKPOINT_AGE,
            ),
            lines(
                "Restarts",
                "Times the workers were started again after a loss.",
                Unit.COUNT,
                Line(or_zero(of(metrics.TRAIN_RESTARTS), of(metrics.TRAIN_STEP), *RUN), "{{run}}"),
                limits=ANY,
            ),
        ),
    ),
)

GPUS = row(
    "GPUs",
    *even(
        8,
        (
            bars(
                "Busy",
                "Share of the time in which a kernel ran, each GPU; idle ones cost as much.",
                Unit.RATIO,
                Line(highest(series.GPU_UTILIZATION, *GPU), EACH_GPU),
                BUSY,
                top=1,
            ),
            bars(
                "Memory",
                "Share of each GPU's memory in use.",
                Unit.RATIO,
                Line(
                    f"{highest(series.GPU_MEMORY_USED, *GPU)} / {highest(series.GPU_MEMORY_TOTAL, *GPU)}", "{{node}} gpu {{gpu}}"
                ),
                FULL,
                top=1,
            ),
            bars(
                "Temperature",
                "Temperature of each GPU's chip.",
                Unit.CELSIUS,
                Line(highest(series.GPU_TEMPERATURE, *GPU), EACH_GPU),
                HOT,
                top=100,
            ),
        ),
    ),
)

BOARD = Board(
    uid="strata-oncall",
    title="Strata: On call",
    description="One page: what is firing, how fast the objectives burn, what is up and what stands still.",
    variables=("cluster", "run", "model", "replica"),
    rows=(ALERTS, ENDPOINT, RUNS, GPUS),
    since="now-3h",
)
