"""Annotations that several boards show: starts of Ray clusters, and restarts of training workers."""

from strata.dashboards import series
from strata.dashboards.board import EVENT_STEP, Annotation
from strata.dashboards.style import PLAIN, WATCH
from strata.platform import metrics

# Only the variable `cluster` is on every board.
HEADS = f'{series.NODE_CPUS.exported}{{IsHeadNode="true", cluster=~"$cluster"}}'
RESTARTS = f'{metrics.TRAIN_RESTARTS.exported}{{cluster=~"$cluster"}}'


def _sessions(heads: str) -> str:
    return f"group by (cluster, namespace, ray_io_cluster, SessionName) ({heads})"


def _by_run(restarts: str) -> str:
    return f"max by (cluster, run) ({restarts})"


# A Ray cluster has a new session at each start of its head.
DEPLOYMENTS = Annotation(
    "Deployments",
    f"{_sessions(HEADS)} unless {_sessions(f'{HEADS} offset {EVENT_STEP}')}",
    "Ray cluster {{namespace}} {{ray_io_cluster}} started",
    PLAIN,
)
# The counter appears with the first restart, so an increase from nothing counts too.
WORKER_RESTARTS = Annotation(
    "Restarts",
    f"{_by_run(RESTARTS)} > ({_by_run(f'{RESTARTS} offset {EVENT_STEP}')} or {_by_run(RESTARTS)} * 0)",
    "Workers of {{run}} restarted",
    WATCH,
)
