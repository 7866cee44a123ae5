"""Serving board: client latency, traffic, errors, prefill placement, engines, tenants, batches and pictures."""

from strata.dashboards.board import Board, even, row
from strata.dashboards.boards.annotations import DEPLOYMENTS
from strata.dashboards.panels import Line, Panel, bars, heat, lines, number
from strata.dashboards.promql import buckets, highest, most, or_zero, per_second, quantile, select, summed
from strata.dashboards.style import ANSWERING, ANY_PER_SECOND, FIRST_TOKEN, FULL, INTER_TOKEN, Limits, Unit
from strata.platform import metrics

MODEL = ("cluster", "model")
EACH = "{{model}}"
REPLICA = (*MODEL, "role", "replica")
EACH_REPLICA = "{{role}} {{replica}}"
POOL = (*MODEL, "role")
EACH_POOL = "{{model}} {{role}}"


def quantiles(title: str, description: str, metric: metrics.Metric, limits: Limits | None = None) -> Panel:
    wanted = (Line(quantile(q / 100, metric, *MODEL), f"{EACH} p{q}") for q in (50, 95, 99))
    return lines(title, description, Unit.SECONDS, *wanted, limits=limits)


def events(title: str, description: str, metric: metrics.Metric, *by: str) -> Panel:
    """Panel of error events per second."""
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
            replicas("decode", "Decode engines. Without one, no request is served.", ANSWERING),
            replicas("prefill", "Prefill engines. Without one, decode engines prefill locally."),
            number(
                "TTFT, p99",
                "99th percentile of the time to first token.",
                Unit.SECONDS,
                Line(quantile(0.99, metrics.SERVE_FIRST_TOKEN), "p99"),
                FIRST_TOKEN,
            ),
            number(
                "ITL, p99",
                "99th percentile of the inter-token latency.",
                Unit.SECONDS,
                Line(quantile(0.99, metrics.SERVE_INTER_TOKEN), "p99"),
                INTER_TOKEN,
            ),
            number(
                "Output throughput",
                "Output tokens per second sent to clients.",
                Unit.TOKENS_PER_SECOND,
                Line(f"sum({per_second(metrics.SERVE_GENERATED_TOKENS, *MODEL)})", "sent"),
            ),
        ),
    ),
)

LATENCY = row(
    "Client latency",
    quantiles(
        "Time to first token (TTFT)",
        "From the arrival of a request to the sending of its first token.",
        metrics.SERVE_FIRST_TOKEN,
        FIRST_TOKEN,
    ),
    heat(
        "TTFT distribution",
        "Requests by TTFT. Two bands are two kinds of request.",
        buckets(metrics.SERVE_FIRST_TOKEN),
    ),
    quantiles(
        "Inter-token latency (ITL)",
        "Time between consecutive tokens of a stream, as sent.",
        metrics.SERVE_INTER_TOKEN,
        INTER_TOKEN,
    ),
    heat(
        "ITL distribution",
        "Tokens by ITL. A second, higher band means stalled streams.",
        buckets(metrics.SERVE_INTER_TOKEN),
    ),
    *even(
        8,
        (
            lines(
                "Engine ITL by concurrent work",
                "p99 of the ITL inside the engine, by the work that ran concurrently. Client ITL above the highest line is spent "
                "between engine and client.",
                Unit.SECONDS,
                Line(quantile(0.99, metrics.SERVE_ENGINE_GAP, *MODEL, "beside"), f"{EACH} {{{{beside}}}}"),
            ),
            quantiles("Request latency", "From the arrival of a request to the end of its response.", metrics.SERVE_REQUEST),
            quantiles("Queue time", "Time that admitted requests waited for a decode engine.", metrics.SERVE_QUEUE),
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
                "Requests per second, by HTTP status.",
                Unit.REQUESTS_PER_SECOND,
                Line(per_second(metrics.SERVE_REQUESTS, *MODEL, "status"), f"{EACH} {{{{status}}}}"),
                stacked=True,
            ),
            lines(
                "Token throughput",
                "Prompt tokens of completed requests and output tokens, per second.",
                Unit.TOKENS_PER_SECOND,
                Line(per_second(metrics.SERVE_PROMPT_TOKENS, *MODEL), f"{EACH} prompt"),
                Line(per_second(metrics.SERVE_GENERATED_TOKENS, *MODEL), f"{EACH} output"),
            ),
            lines(
                "Requests in flight and queued",
                "Requests on decode replicas, and requests that wait in the queue.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_IN_FLIGHT, *MODEL), f"{EACH} in flight"),
                Line(summed(metrics.SERVE_QUEUED, *MODEL), f"{EACH} queued"),
            ).about("StrataQueueGrowing"),
        ),
    ),
)

TROUBLE = row(
    "Errors",
    *even(
        6,
        (
            events("Rejections", "Requests not admitted, by reason.", metrics.SERVE_REJECTIONS, "reason").about(
                "StrataRequestsRejected"
            ),
            events(
                "Retries",
                "Requests retried on another replica before their first token, by reason.",
                metrics.SERVE_RETRIES,
                "reason",
            ),
            events(
                "Migrations",
                "Streams that lost their decode replica, by outcome.",
                metrics.SERVE_MIGRATIONS,
                "outcome",
            ),
            events("Disconnects", "Clients that disconnected before the end of the response.", metrics.SERVE_DISCONNECTS),
        ),
    ),
)

PREFILL = row(
    "Prefill and KV transfer",
    *even(
        8,
        (
            lines(
                "Prefill placement",
                "Prompts per second, prefilled locally on the decode engine or remotely by the prefill pool.",
                Unit.PER_SECOND,
                Line(per_second(metrics.SERVE_PREFILLS, *MODEL, "where"), f"{EACH} {{{{where}}}}"),
                stacked=True,
            ),
            lines(
                "Choice of replicas",
                "Requests per second, by the reason for the choice of their decode replica.",
                Unit.PER_SECOND,
                Line(per_second(metrics.SERVE_ROUTED, *MODEL, "reason"), f"{EACH} {{{{reason}}}}"),
                stacked=True,
            ),
            lines(
                "Prefill placement by reason",
                "Prompts per second, by the reason for their placement.",
                Unit.PER_SECOND,
                Line(per_second(metrics.SERVE_PREFILLS, *MODEL, "where", "reason"), f"{EACH} {{{{where}}}}: {{{{reason}}}}"),
                stacked=True,
            ).about("StrataPrefillFallback"),
        ),
    ),
    *even(
        8,
        (
            quantiles(
                "Remote prefill time", "From the request to a prefill replica to its response.", metrics.SERVE_REMOTE_PREFILL
            ),
            quantiles("KV transfer time", "Time of one transfer of KV blocks between engines.", metrics.SERVE_KV_SECONDS),
            lines(
                "KV transfer rate",
                "Bytes per second that all decode engines read from prefill engines.",
                Unit.BYTES_PER_SECOND,
                Line(per_second(metrics.SERVE_KV_BYTES, *MODEL), EACH),
            ),
        ),
    ),
    *even(
        8,
        (
            events(
                "Failed remote prefills",
                "Remote prefills that failed and ran again elsewhere.",
                metrics.SERVE_REMOTE_PREFILL_FAILURES,
            ),
            events("Failed KV transfers", "Transfers of KV blocks that failed.", metrics.SERVE_KV_FAILURES).about(
                "StrataKvTransfersFailing"
            ),
            events("Expired KV", "Prefilled prompts whose KV blocks were never read.", metrics.SERVE_KV_EXPIRED),
        ),
    ),
    collapsed=True,
)

ENGINES = row(
    "Engines",
    lines(
        "Replicas by role",
        "Healthy replicas, by role.",
        Unit.COUNT,
        Line(summed(metrics.SERVE_REPLICAS, *MODEL, "role"), f"{EACH} {{{{role}}}}"),
    ),
    lines(
        "KV cache usage",
        "Share of KV blocks in use: on the fullest engine of a pool, and their mean. At 1, sequences are preempted.",
        Unit.RATIO,
        Line(highest(metrics.SERVE_KV_USAGE, *POOL), f"{EACH_POOL} highest"),
        Line(f"avg by ({', '.join(POOL)}) ({select(metrics.SERVE_KV_USAGE)})", f"{EACH_POOL} mean"),
        limits=FULL,
        top=1,
    ).about("StrataKvCacheExhausted"),
    *even(
        8,
        (
            lines(
                "Running sequences",
                "Sequences in the batches of all engines of a pool.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_RUNNING, *POOL), EACH_POOL),
            ),
            lines(
                "Waiting sequences",
                "Sequences in the queues of all engines of a pool.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_WAITING, *POOL), EACH_POOL),
            ).about("StrataPrefillDecodeImbalance"),
            lines(
                "Prefix cache hit rate",
                "Share of prompt tokens found in the prefix caches of a pool, and in its tiers of host memory and disk.",
                Unit.RATIO,
                Line(
                    f"{per_second(metrics.SERVE_PREFIX_HIT, *POOL)} / {per_second(metrics.SERVE_PREFIX_QUERIED, *POOL)}",
                    EACH_POOL,
                ),
                Line(
                    f"{per_second(metrics.SERVE_TIER_HIT, *POOL, 'tier')} / ignoring (tier) group_left "
                    f"{per_second(metrics.SERVE_PREFIX_QUERIED, *POOL)}",
                    f"{EACH_POOL} {{{{tier}}}}",
                ),
                top=1,
            ),
        ),
    ),
    *even(
        12,
        (
            lines(
                "Drafted and accepted tokens",
                "Tokens per second of speculative decoding: drafted and verified, and those of them that the model accepted.",
                Unit.TOKENS_PER_SECOND,
                Line(per_second(metrics.SERVE_DRAFTED, *POOL), f"{EACH_POOL} drafted"),
                Line(per_second(metrics.SERVE_ACCEPTED, *POOL), f"{EACH_POOL} accepted"),
            ),
            lines(
                "Draft acceptance by position",
                "Share of the drafted tokens that the model accepted, by position in the draft.",
                Unit.RATIO,
                Line(
                    f"{per_second(metrics.SERVE_ACCEPTED, *POOL, 'position')} / "
                    f"{per_second(metrics.SERVE_DRAFTED, *POOL, 'position')}",
                    f"{EACH_POOL} {{{{position}}}}",
                ),
                top=1,
            ),
        ),
    ),
    *even(
        8,
        (
            lines(
                "Adapters in memory",
                "LoRA adapters in the memory of all engines of a pool, and requests that wait for a slot.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_ADAPTERS, *POOL), EACH_POOL),
                Line(summed(metrics.SERVE_ADAPTERS_WAITING, *POOL), f"{EACH_POOL} waiting"),
            ),
            quantiles("Adapter load time", "Time to load an adapter into an engine.", metrics.SERVE_ADAPTER_LOAD),
            events(
                "Freed adapters",
                "Adapters that engines freed, by reason: memory for others, or removed.",
                metrics.SERVE_ADAPTER_EVICTIONS,
                "reason",
            ),
        ),
    ),
    bars(
        "Fullest engines",
        "Engines with the highest share of KV blocks in use.",
        Unit.RATIO,
        Line(most(highest(metrics.SERVE_KV_USAGE, *REPLICA)), EACH_REPLICA),
        limits=FULL,
        top=1,
    ),
    bars(
        "Longest queues",
        "Engines with the most waiting sequences.",
        Unit.COUNT,
        Line(most(summed(metrics.SERVE_WAITING, *REPLICA)), EACH_REPLICA),
    ),
    collapsed=True,
)

PICTURES = row(
    "Pictures",
    *even(
        8,
        (
            lines(
                "Pictures by outcome",
                "Pictures per second, by outcome.",
                Unit.PER_SECOND,
                Line(per_second(metrics.SERVE_PICTURES, *MODEL, "outcome"), f"{EACH} {{{{outcome}}}}"),
                stacked=True,
            ),
            quantiles("Step time", "Time of a sampling step of a batch.", metrics.SERVE_PICTURE_STEP),
            lines(
                "Pictures running and waiting",
                "Pictures in the batches of all replicas, and pictures that wait for a batch of their size and steps.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_PICTURES_RUNNING, *MODEL), f"{EACH} running"),
                Line(summed(metrics.SERVE_PICTURES_WAITING, *MODEL), f"{EACH} waiting"),
            ),
        ),
    ),
    *even(
        8,
        (
            lines(
                "Pictures per batch",
                "Mean number of pictures in the batches that began.",
                Unit.COUNT,
                Line(
                    f"{per_second(metrics.SERVE_PICTURES_BATCHED, *MODEL)} / {per_second(metrics.SERVE_PICTURE_BATCHES, *MODEL)}",
                    EACH,
                ),
            ),
            lines(
                "Picture steps",
                "Sampling steps per second, each counted once for every picture of its batch.",
                Unit.PER_SECOND,
                Line(per_second(metrics.SERVE_PICTURE_STEPS, *MODEL), EACH),
            ),
            events(
                "Worker restarts", "Worker groups that were started again after a worker was lost.", metrics.SERVE_WORKER_RESTARTS
            ),
        ),
    ),
    collapsed=True,
)

TENANT = (*MODEL, "tenant")
EACH_TENANT = "{{model}} {{tenant}}"

TENANTS = row(
    "Tenants",
    *even(
        8,
        (
            lines(
                "TTFT by tenant",
                "p99 of the time to first token, time in the queue included.",
                Unit.SECONDS,
                Line(quantile(0.99, metrics.SERVE_TENANT_FIRST_TOKEN, *TENANT), EACH_TENANT),
                limits=FIRST_TOKEN,
            ),
            lines(
                "Requests by tenant",
                "Requests per second, by tenant and HTTP status.",
                Unit.REQUESTS_PER_SECOND,
                Line(per_second(metrics.SERVE_TENANT_REQUESTS, *TENANT, "status"), f"{EACH_TENANT} {{{{status}}}}"),
                stacked=True,
            ),
            lines(
                "Tokens by tenant",
                "Input and output tokens per second of ended requests.",
                Unit.TOKENS_PER_SECOND,
                Line(per_second(metrics.SERVE_TENANT_TOKENS, *TENANT, "direction"), f"{EACH_TENANT} {{{{direction}}}}"),
            ),
        ),
    ),
    *even(
        8,
        (
            lines(
                "Running requests by tenant",
                "Requests on decode replicas. With several active tenants, each has its share by weight at most.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_TENANT_RUNNING, *TENANT), EACH_TENANT),
                stacked=True,
            ),
            lines(
                "Queued requests by tenant",
                "Requests that wait in the gateways' fair queue.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_TENANT_QUEUED, *TENANT), EACH_TENANT),
                stacked=True,
            ),
            lines(
                "Refusals by tenant",
                "Requests per second that a limit of their tenant refused.",
                Unit.PER_SECOND,
                Line(per_second(metrics.SERVE_TENANT_REFUSALS, *TENANT, "limit"), f"{EACH_TENANT} {{{{limit}}}}"),
            ),
        ),
    ),
    collapsed=True,
)

BATCHES = row(
    "Batches",
    *even(
        12,
        (
            lines(
                "Requests of batches",
                "Requests of batches in progress, and those that wait for idle slots.",
                Unit.COUNT,
                Line(summed(metrics.SERVE_BATCH_RUNNING, *MODEL), "{{model}} running"),
                Line(summed(metrics.SERVE_BATCH_WAITING, *MODEL), "{{model}} waiting"),
            ),
            events(
                "Ended requests of batches",
                "Requests of batches by their ending: completed, failed, or expired with their window.",
                metrics.SERVE_BATCH_REQUESTS,
                "ending",
            ),
        ),
    ),
    collapsed=True,
)

BOARD = Board(
    uid="strata-serving",
    title="Strata: Serving",
    description="Endpoint: client latency, traffic, errors, prefill, KV transfer, engines, tenants, batches and pictures.",
    variables=("cluster", "ray_cluster", "team", "model", "replica"),
    rows=(SUMMARY, LATENCY, TRAFFIC, TROUBLE, PREFILL, ENGINES, TENANTS, BATCHES, PICTURES),
    annotations=(DEPLOYMENTS,),
)
