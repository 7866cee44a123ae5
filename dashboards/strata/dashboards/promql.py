"""PromQL expressions built from metric definitions.

Every selector filters by the dashboard variables that the metric has a label for. A restarted worker or replica creates new
series (Ray labels them by worker), so every query aggregates. A query over a range of time reads no series per GPU: at 16,384
GPUs it would read millions of samples, and draw thousands of lines.
"""

from strata.dashboards import series
from strata.dashboards.series import Readable
from strata.platform import metrics

RATE = "[$__rate_interval]"
OBJECTIVE = 0.99  # share of TTFT and of ITL observations that must be in time
AVAILABILITY = 0.999  # share of requests without a server error, and of time with a decode replica
WORST = 10  # series in a panel of the highest or lowest values
# Labels by dashboard variable.
FILTERS = {
    "cluster": "cluster",
    "ray_cluster": "ray_io_cluster",
    "team": "namespace",
    "node": "node",
    "run": "run",
    "model": "model",
}
NODE_EXPORTERS = "nodes"
STEP = "5m"  # the windows of the team rules, which a subquery adds up without overlap


def select(what: Readable, *matchers: str, suffix: str = "") -> str:
    """Selector of a metric. The variable `replica` filters engine metrics only; gateway metrics cover the whole endpoint."""
    narrowed = [*matchers, *(f'{label}=~"{_values(name, what)}"' for name, label in FILTERS.items() if label in labels(what))]
    if what in metrics.SERVING_ENGINE:
        narrowed.append('replica=~"$replica"')
    return what.exported + suffix + ("{" + ", ".join(narrowed) + "}" if narrowed else "")


def _values(variable: str, what: Readable) -> str:
    """Values of a variable as a regular expression. Where `cluster` is the name of a Ray cluster, the exporters of nodes, which
    belong to none, have the value `nodes`."""
    return f"${variable}|{NODE_EXPORTERS}" if variable == "cluster" and _is_of_nodes(what) else f"${variable}"


def _is_of_nodes(what: Readable) -> bool:
    return what.source in ("gpu rules", "fleet rules", "team rules") if isinstance(what, series.Series) else what in metrics.GPUS


def labels(what: Readable) -> tuple[str, ...]:
    """Labels of a series in Prometheus. A node's GPU exporter runs in a namespace of its own and belongs to no Ray cluster."""
    if isinstance(what, series.Series):
        return what.labels
    return ("cluster", *what.labels) if what in metrics.GPUS else (*series.POD, *what.labels)


def highest(what: Readable, *by: str, matchers: tuple[str, ...] = ()) -> str:
    """Maximum of a gauge that one process sets. Merges the series of a restarted worker with that of its predecessor."""
    return f"max by ({', '.join(by)}) ({select(what, *matchers)})"


def summed(what: Readable, *by: str, matchers: tuple[str, ...] = ()) -> str:
    return f"sum by ({', '.join(by)}) ({select(what, *matchers)})"


def or_zero(events: str, beside: str, *on: str) -> str:
    """Zero for a counter that does not exist yet, wherever the series `beside` exists."""
    return f"{events} or on ({', '.join(on)}) {beside} * 0"


def per_second(what: Readable, *by: str, matchers: tuple[str, ...] = ()) -> str:
    return f"sum by ({', '.join(by)}) (rate({select(what, *matchers)}{RATE}))"


def quantile(q: float, what: Readable, *by: str) -> str:
    return f"histogram_quantile({q}, sum by ({', '.join((*by, 'le'))}) (rate({select(what, suffix='_bucket')}{RATE})))"


def buckets(what: Readable) -> str:
    """Observations per bucket, for a heatmap."""
    return f"sum by (le) (increase({select(what, suffix='_bucket')}{RATE}))"


def burn(misses: Readable, objective: float = OBJECTIVE) -> str:
    """Burn rate of an objective: misses relative to the allowed share. At 1, the error budget lasts exactly its period."""
    return f"{highest(misses, 'cluster', 'model')} / {1 - objective:.3g}"


def most(values: str) -> str:
    return f"topk({WORST}, {values})"


def least(values: str) -> str:
    return f"bottomk({WORST}, {values})"


def spread(values: str) -> dict[str, str]:
    """Highest, median and lowest of many series, by their legends: three lines for any number of nodes."""
    return {"highest": f"max({values})", "median": f"quantile(0.5, {values})", "lowest": f"min({values})"}


def over_range(amounts: Readable, *by: str) -> str:
    """Sum of the 5-minute amounts of a team rule over the dashboard's time range."""
    return f"sum by ({', '.join(by)}) (sum_over_time({select(amounts)}[$__range:{STEP}]))"
