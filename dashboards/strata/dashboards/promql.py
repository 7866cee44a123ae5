"""PromQL expressions built from metric definitions.

Every selector filters by the dashboard variables that the metric has a label for. A restarted worker or replica creates new
series (Ray labels them by worker), so every query aggregates.
"""

from strata.dashboards import series
from strata.dashboards.series import Readable
from strata.platform import metrics

RATE = "[$__rate_interval]"
OBJECTIVE = 0.99  # share of TTFT and of ITL observations that must be in time


def select(what: Readable, *matchers: str, suffix: str = "") -> str:
    """Selector of a metric. The variable `replica` filters engine metrics only; gateway metrics cover the whole endpoint."""
    variables: list[str] = [label for label in ("cluster", "run", "model") if label in labels(what)]
    if what in metrics.SERVING_ENGINE:
        variables.append("replica")
    narrowed = [*matchers, *(f'{name}=~"${name}"' for name in variables)]
    return what.exported + suffix + ("{" + ", ".join(narrowed) + "}" if narrowed else "")


def labels(what: Readable) -> tuple[str, ...]:
    return what.labels if isinstance(what, series.Series) else ("cluster", *what.labels)


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


def burn(misses: Readable) -> str:
    """Burn rate of an objective: misses relative to the allowed share. At 1, the error budget lasts exactly its period."""
    return f"{highest(misses, 'cluster', 'model')} / {1 - OBJECTIVE:.2f}"
