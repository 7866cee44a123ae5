"""The endpoint as clients feel it, and below that what its engines do."""

from strata.dashboards.board import Board, even, row
from strata.dashboards.panels import Line, Panel, heat, lines, number
from strata.dashboards.promql import buckets, highest, or_zero, per_second, quantile, summed
from strata.dashboards.style import ANSWERING, ANY_PER_SECOND, FIRST_TOKEN, FULL, INTER_TOKEN, Limits, Unit
from strata.platform import metrics

MODEL = ("cluster", "model")
EACH = "{{model}}"
REPLICA = (*MODEL, "role", "replica")
EACH_REPLICA = "{{role}} {{replica}}"


def quantiles(title: str, description: str, metric: metrics.Metric, limits: Limits | None = None) -> Panel:
    wanted = (Line(quantile(q / 100, metric, *MODEL), f"{EACH} p{q}") for q in (50, 95, 99))
    return lines(title, description, Unit.SECONDS, *wanted, limits=limits)


def events(title: str, description: str, metric: metrics.Metric, *by: str) -> Panel:
    """What goes wrong, in times a second."""
    legend = " ".join((EACH, *(f"{{{{{label}}}}}" for label in by)))
    expr = or_zero(per_second(metric, *MODEL, *by), summed(metrics.SERVE_REPLICAS, *MODEL), *MODEL)
    return lines(title, description, Unit.PER_SECOND, Line(expr, legend), limits=ANY_PER_SECOND)


def replicas(role: str, description: str, limits: Limits | None = None) -> Panel:
    answering = summed(metrics.SERVE_REPLICAS, "role", matchers=(f'role="{role}"',))
    return number(f"{role.capitalize()} replicas", description, Unit.COUNT, Line(answering, role), limits, empty="none")


SUMMARY = row(
    "Now",
    *even(
        4,
        (
            replicas("gateway", "Gateways that answer clients.", ANSWERING),
            replicas("decode", "Engines that decode; without one nothing is answered.", ANSWERING),
            replicas("prefill", "Engines that prefill for the others; without one, decode engines prefill themselves."),
            number(
                "First token, p99",
                "The time that 99 of 100 first tokens take at most.",
                Unit.SECONDS,
                Line(quantile(0.99, metrics.SERVE_FIRST_TOKEN), "p99"),
                FIRST_TOKEN,
            ),
            number(
                "Between tokens, p99",
                "The time that 99 of 100 gaps between tokens take at most.",
                Unit.SECONDS,
                Line(quantile(0.99, metrics.SERVE_INTER_TOKEN), "p99"),
                INTER_TOKEN,
            ),
            number(
                "Tokens out",
                "Tokens a second sent to clients.",
                Unit.TOKENS_PER_SECOND,
                Line(f"sum({per_second(metrics.SERVE_GENERATED_TOKENS, *MODEL)})", "sent"),
            ),
        ),
    ),
)

LATENCY = row(
    "What clients feel",
    quantiles(
        "Time to first token",
        "From a request's arrival to its first token on its way out.",
        metrics.SERVE_FIRST_TOKEN,
        FIRST_TOKEN,
    ),
    heat(
        "First tokens",
        "How many first tokens took how long; two bands are two kinds of request.",
        buckets(metrics.SERVE_FIRST_TOKEN),
    ),
    quantiles(
        "Time between tokens", "From one token of a stream to the next, on their way out.", metrics.SERVE_INTER_TOKEN, INTER_TOKEN
    ),
    heat(
        "Gaps", "How many gaps between tokens were how long; a band above is streams held up.", buckets(metrics.SERVE_INTER_TOKEN)
    ),
    *even(
        8,
        (
            lines(
                "What lengthens gaps",
                "99 of 100 gaps by the engine's clock, apart by what the engine or its prefill pool did beside; what clients "
                "feel above the highest of them is the way from engine to client.",
                Unit.SECONDS,
                Line(quantile(0.99, metrics.SERVE_ENGINE_GAP, *MODEL, "beside"), f"{EACH} {{{{beside}}}}"),
            ),
            quantiles("Whole request", "From a request's arrival to the end of its answer.", metrics.SERVE_REQUEST),
            quantiles("In the queue", "How long admitted requests waited for a place on a decode engine.", metrics.SERVE_QUEUE),
        ),
    ),
)

TRAFFIC = row(
    "Traffic",
    *even(
        8,
        (
            lines(
                "Requests by status",
                "Requests answered a second, by HTTP status.",
                Unit.REQUESTS_PER_SECOND,
                Line(per_second(metrics.SERVE_REQUESTS, *MODEL, "status"), f"{EACH} {{{{status}}}}"),
                stacked=True,
            ),
            lines(
                "Tokens in and out",
                "Tokens a second in the prompts of answered requests, and sent to clients.",
                Unit.TOKENS_PER_SECOND,
                Line(per_second(metrics.SERVE_PROMPT_TOKENS, *MODEL), f"{EACH} in"),
                Line(per_second(metrics.SERVE_GENERATED_TOKENS, *MODEL), f"{EACH} out"),
            ),
            lines(
                "In flight and queued",
                "Requests that decode replicas work on, and those that wait for a place.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_IN_FLIGHT, *MODEL), f"{EACH} in flight"),
                Line(summed(metrics.SERVE_QUEUED, *MODEL), f"{EACH} queued"),
            ),
        ),
    ),
)

TROUBLE = row(
    "What goes wrong",
    *even(
        6,
        (
            events("Rejections", "Requests not admitted, by reason.", metrics.SERVE_REJECTIONS, "reason"),
            events(
                "Retries", "Requests begun again elsewhere before their first token, by reason.", metrics.SERVE_RETRIES, "reason"
            ),
            events(
                "Migrations",
                "Streams whose decode replica was lost, by what became of them.",
                metrics.SERVE_MIGRATIONS,
                "outcome",
            ),
            events("Disconnects", "Clients that left before the end of their answer.", metrics.SERVE_DISCONNECTS),
        ),
    ),
)

PREFILL = row(
    "Prefill: where, and the way back",
    lines(
        "Where prompts are prefilled",
        "Prompts a second prefilled by their own decode engine and by the prefill pool.",
        Unit.PER_SECOND,
        Line(per_second(metrics.SERVE_PREFILLS, *MODEL, "where"), f"{EACH} {{{{where}}}}"),
        stacked=True,
    ),
    lines(
        "Why there",
        "The same prompts by the reason for the choice.",
        Unit.PER_SECOND,
        Line(per_second(metrics.SERVE_PREFILLS, *MODEL, "where", "reason"), f"{EACH} {{{{where}}}}: {{{{reason}}}}"),
        stacked=True,
    ),
    *even(
        8,
        (
            quantiles("Remote prefill", "From asking a prefill replica to its answer.", metrics.SERVE_REMOTE_PREFILL),
            quantiles("KV transfer time", "Time of one transfer of KV blocks between engines.", metrics.SERVE_KV_SECONDS),
            lines(
                "KV transferred",
                "KV cache that decode engines pull from prefill engines.",
                Unit.BYTES_PER_SECOND,
                Line(per_second(metrics.SERVE_KV_BYTES, *REPLICA), EACH_REPLICA),
            ),
        ),
    ),
    *even(
        8,
        (
            events(
                "Lost remote prefills",
                "Remote prefills that were lost and done again elsewhere.",
                metrics.SERVE_REMOTE_PREFILL_FAILURES,
            ),
            events("Failed KV transfers", "Transfers of KV blocks that failed.", metrics.SERVE_KV_FAILURES),
            events("Expired KV", "Prefilled prompts whose blocks nobody came for.", metrics.SERVE_KV_EXPIRED),
        ),
    ),
)

ENGINES = row(
    "Engines",
    lines(
        "Replicas by role",
        "Replicas that answer, by what they do.",
        Unit.COUNT,
        Line(summed(metrics.SERVE_REPLICAS, *MODEL, "role"), f"{EACH} {{{{role}}}}"),
    ),
    lines(
        "KV cache in use",
        "Share of KV blocks that requests hold; at 1, sequences are put back in the queue.",
        Unit.RATIO,
        Line(highest(metrics.SERVE_KV_USAGE, *REPLICA), EACH_REPLICA),
        limits=FULL,
        top=1,
    ),
    *even(
        8,
        (
            lines(
                "Running",
                "Sequences in each engine's batch.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_RUNNING, *REPLICA), EACH_REPLICA),
            ),
            lines(
                "Waiting",
                "Sequences that an engine has not begun, or waits with.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_WAITING, *REPLICA), EACH_REPLICA),
            ),
            lines(
                "Prefix cache hits",
                "Share of prompt tokens found in the prefix cache.",
                Unit.RATIO,
                Line(
                    f"{per_second(metrics.SERVE_PREFIX_HIT, *REPLICA)} / {per_second(metrics.SERVE_PREFIX_QUERIED, *REPLICA)}",
                    EACH_REPLICA,
                ),
                top=1,
            ),
        ),
    ),
)

BOARD = Board(
    uid="strata-serving",
    title="Strata: Serving",
    description="The endpoint: client latencies, traffic, what goes wrong, where prompts are prefilled, and the engines.",
    variables=("cluster", "model", "replica"),
    rows=(SUMMARY, LATENCY, TRAFFIC, TROUBLE, PREFILL, ENGINES),
)
