"""On-call board: firing alerts, SLO burn rates, and the state of endpoint, runs and GPUs."""

from strata.dashboards import series
from strata.dashboards.board import Board, even, row
from strata.dashboards.boards.annotations import DEPLOYMENTS, WORKER_RESTARTS
from strata.dashboards.panels import Line, Panel, alert_list, bars, lines, number, table_of
from strata.dashboards.promql import (
    AVAILABILITY,
    OBJECTIVE,
    burn,
    highest,
    least,
    most,
    or_zero,
    per_second,
    quantile,
    select,
    summed,
)
from strata.dashboards.style import ANSWERING, ANY, BURN, BUSY, CHECKPOINT_AGE, FIRST_TOKEN, FULL, HOT, INTER_TOKEN, MISSED, Unit
from strata.platform import metrics

GPU = ("cluster", "node", "gpu")
RUN = ("cluster", "run")
MODEL = ("cluster", "model")
FIRING = ('alertstate="firing"',)
ANSWERED = per_second(metrics.SERVE_REQUESTS, *MODEL)
FAILED = per_second(metrics.SERVE_REQUESTS, *MODEL, matchers=('status=~"5.."',))
EACH_GPU = "{{node}} gpu {{gpu}}"


def of(metric: metrics.Metric) -> str:
    return highest(metric, *RUN)


def burning(title: str, what: str, misses: dict[str, series.Series], *alerts: str, objective: float = OBJECTIVE) -> Panel:
    each = (Line(burn(misses[window], objective), f"{{{{model}}}} over {window}") for window in series.WINDOWS)
    return lines(
        title,
        f"Error budget burn rate of the {what} objective. Pages when both 5m and 1h are above 14.4.",
        Unit.BURN,
        *each,
        limits=BURN,
    ).about(*alerts)


ALERTS = row(
    "Firing alerts",
    table_of(
        "Alerts",
        "Firing alerts with their labels. A name links to its runbook and to the boards.",
        select(series.ALERTS, *FIRING),
    ).wide(12),
    alert_list("Grafana alerts", "Pending and firing alerts of rules that Grafana evaluates.").wide(6),
    lines(
        "Alerts by severity",
        "Number of firing alerts.",
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
                "Decode engines up",
                "Decode engines. Without one, no request is served.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_REPLICAS, "role", matchers=('role="decode"',)), "up"),
                ANSWERING,
                empty="none",
            ).about("StrataEndpointDown"),
            number(
                "Server errors",
                "Share of requests answered with a 5xx status.",
                Unit.RATIO,
                Line(f"(sum({FAILED}) or vector(0)) / sum({ANSWERED})", "5xx"),
                MISSED,
                empty="no requests",
            ),
            number(
                "TTFT, p99",
                "99th percentile of the time to first token. The objective is 2 s.",
                Unit.SECONDS,
                Line(quantile(0.99, metrics.SERVE_FIRST_TOKEN), "p99"),
                FIRST_TOKEN,
            ),
            number(
                "ITL, p99",
                "99th percentile of the inter-token latency. The objective is 0.1 s.",
                Unit.SECONDS,
                Line(quantile(0.99, metrics.SERVE_INTER_TOKEN), "p99"),
                INTER_TOKEN,
            ),
            number(
                "KV cache usage, maximum",
                "Share of KV blocks in use on the fullest engine.",
                Unit.RATIO,
                Line(f"max({highest(metrics.SERVE_KV_USAGE, *MODEL)})", "in use"),
                FULL,
            ).about("StrataKvCacheFull"),
        ),
    ),
    burning("TTFT: burn rate", "TTFT", series.FIRST_TOKEN_MISSES, "StrataFirstTokenSloBurnFast", "StrataFirstTokenSloBurnSlow"),
    burning("ITL: burn rate", "ITL", series.INTER_TOKEN_MISSES, "StrataInterTokenSloBurnFast", "StrataInterTokenSloBurnSlow"),
    burning(
        "Errors: burn rate",
        "error",
        series.ERRORS,
        "StrataErrorBudgetBurnFast",
        "StrataErrorBudgetBurnSlow",
        objective=AVAILABILITY,
    ),
    burning(
        "Availability: burn rate",
        "availability",
        series.UNAVAILABLE,
        "StrataAvailabilityBurnFast",
        "StrataAvailabilityBurnSlow",
        objective=AVAILABILITY,
    ),
)

RUNS = row(
    "Runs",
    *even(
        6,
        (
            bars(
                "Progress",
                "Completed steps over planned steps, for active runs.",
                Unit.RATIO,
                Line(f"{of(metrics.TRAIN_STEP)} / {of(metrics.TRAIN_STEPS_PLANNED)}", "{{run}}"),
                top=1,
            ),
            lines(
                "Throughput",
                "Tokens per second from the token counter. 0 means that the run is stalled.",
                Unit.TOKENS_PER_SECOND,
                Line(per_second(metrics.TRAIN_TOKENS, *RUN), "{{run}}"),
            ),
            lines(
                "Checkpoint age",
                "Time since the last complete checkpoint in storage.",
                Unit.SECONDS,
                Line(f"time() - {of(metrics.TRAIN_CHECKPOINT_TIME)}", "{{run}}"),
                limits=CHECKPOINT_AGE,
            ),
            lines(
                "Restarts",
                "Restarts of the workers after a failure.",
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
                "Least busy nodes",
                "Mean share of the time in which a kernel ran, over the GPUs of a node.",
                Unit.RATIO,
                Line(least(f"avg by (cluster, node) ({select(series.NODE_UTILIZATION)})"), "{{node}}"),
                limits=BUSY,
                top=1,
            ),
            bars(
                "Fullest GPUs",
                "Share of memory in use.",
                Unit.RATIO,
                Line(most(f"{highest(series.GPU_MEMORY_USED, *GPU)} / {highest(series.GPU_MEMORY_TOTAL, *GPU)}"), EACH_GPU),
                limits=FULL,
                top=1,
            ),
            bars(
                "Hottest GPUs",
                "Chip temperature.",
                Unit.CELSIUS,
                Line(most(highest(series.GPU_TEMPERATURE, *GPU)), EACH_GPU),
                limits=HOT,
                top=100,
            ),
        ),
    ),
)

BOARD = Board(
    uid="strata-oncall",
    title="Strata: On call",
    description="Firing alerts, SLO burn rates, endpoint health, training progress and GPUs.",
    variables=("cluster", "ray_cluster", "team", "node", "run", "model", "replica"),
    rows=(ALERTS, ENDPOINT, RUNS, GPUS),
    since="now-3h",
    annotations=(WORKER_RESTARTS, DEPLOYMENTS),
)
