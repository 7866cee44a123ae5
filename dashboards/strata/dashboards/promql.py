"""Queries, written from metrics so that no name and no label filter is written twice.

Every selector is narrowed by the board's variables that the metric has a label for. A worker or a replica that was started
again makes new series (Ray labels them by worker), so nothing is read without an aggregation.
"""

from strata.dashboards import series
from strata.dashboards.series import Readable
from strata.platform import metrics

RATE = "[$__rate_interval]"
OBJECTIVE = 0.99  # of first tokens and of gaps between tokens, the share that must be in time


def select(what: Readable, *matchers: str, suffix: str = "") -> str:
    """`replica` narrows what engines measure; what gateways measure is of the whole endpoint."""
    variables: list[str] = [label for label in ("cluster", "run", "model") if label in labels(what)]
    if what in metrics.SERVING_ENGINE:
        variables.append("replica")
    narrowed = [*matchers, *(f'{name}=~"${name}"' for name in variables)]
    return what.exported + suffix + ("{" + ", ".join(narrowed) + "}" if narrowed else "")


def labels(what: Readable) -> tuple[str, ...]:
    return what.labels if isinstance(what, series.Series) else ("cluster", *what.labels)


def highest(what: Readable, *by: str, matchers: tuple[str, ...] = ()) -> str:
    """For a gauge that one process sets: the newest series of a restarted worker and the old one's last value are one."""
    return f"max by ({', '.join(by)}) ({select(what, *matchers)})"


def summed(what: Readable, *by: str, matchers: tuple[str, ...] = ()) -> str:
    return f"sum by ({', '.join(by)}) ({select(what, *matchers)})"


def or_zero(events: str, beside: str, *on: str) -> str:
    """A counter that nothing has been counted in may not be there: it is zero wherever what it stands beside is there."""
    return f"{events} or on ({', '.join(on)}) {beside} * 0"


def per_second(what: Readable, *by: str, matchers: tuple[str, ...] = ()) -> str:
    return f"sum by ({', '.join(by)}) (rate({select(what, *matchers)}{RATE}))"


def quantile(q: float, what: Readable, *by: str) -> str:
    return f"histogram_quantile({q}, sum by ({', '.join((*by, 'le'))}) (rate({select(what, suffix='_bucket')}{RATE})))"


def buckets(what: Readable) -> str:
    """For a heatmap: how many observations each bucket got."""
    return f"sum by (le) (increase({select(what, suffix='_bucket')}{RATE}))"


def burn(misses: Readable) -> str:
    """How many times faster than the objective allows its misses come: at 1 the month's allowance lasts the month."""
    return f"{highest(misses, 'cluster', 'model')} / {1 - OBJECTIVE:.2f}"
