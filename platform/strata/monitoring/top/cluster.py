"""State of a cluster from a Prometheus server: GPUs by node, teams and the cost of idle GPUs, runs, endpoint and alerts.

It reads recording rules by node and team (infra/prometheus/rules) and no series per GPU.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from strata.monitoring.top.endpoint import Absent, Endpoint, Latency, Recently, Replica
from strata.monitoring.top.prometheus import Prometheus, quoted, select
from strata.monitoring.top.runs import Progress
from strata.platform import metrics
from strata.platform.metrics import Metric

NODES_SHOWN, TEAMS_SHOWN, RUNS_SHOWN, ALERTS_SHOWN = 5, 10, 8, 5
WINDOW_S = 120.0  # of rates; several scrapes, also at intervals of 30 s
PACE = "10m"  # of a run's speed
SILENT_S = 300.0  # a run without a step in this time is marked
COURSE_S, COURSE_STEP_S = 3600.0, 60.0  # of losses
SEVERITIES = ("critical", "warning", "info")

NODE_GPUS = "strata:node_gpus:count"
NODE_UTILIZATION = "strata:node_gpu_utilization:avg"
NODE_MEMORY_USED = "strata:node_gpu_memory_used:bytes"
NODE_MEMORY_TOTAL = "strata:node_gpu_memory_total:bytes"
NODE_POWER = "strata:node_gpu_power:watts"
NODE_TEMPERATURE = "strata:node_gpu_temperature:max"
THROTTLED = "strata:gpus_throttled:count"
TEAM_GPUS = "strata:team_gpus:count"
TEAM_IDLE = "strata:team_gpus_idle:count"
TEAM_COST = "strata:team_cost:dollars_per_hour"
TEAM_IDLE_COST = "strata:team_idle_cost:dollars_per_hour"
TEAM_IDLE_DOLLARS = "strata:team_idle_cost_dollars:sum5m"
RECORDED = (
    *(NODE_GPUS, NODE_UTILIZATION, NODE_MEMORY_USED, NODE_MEMORY_TOTAL, NODE_POWER, NODE_TEMPERATURE, THROTTLED),
    *(TEAM_GPUS, TEAM_IDLE, TEAM_COST, TEAM_IDLE_COST, TEAM_IDLE_DOLLARS),
)


@dataclass(frozen=True)
class Node:
    name: str
    gpus: float
    utilization: float | None
    memory: float | None  # share in use
    power: float | None  # watts
    temperature: float | None  # of its hottest GPU


@dataclass(frozen=True)
class Gpus:
    count: float
    nodes: float
    utilization: float | None
    memory: float | None
    power: float | None
    idle: float
    throttled: Mapping[str, float]  # by reason
    least_busy: tuple[Node, ...]
    hottest: tuple[Node, ...]


@dataclass(frozen=True)
class Team:
    name: str  # empty: GPUs of no pod
    gpus: float
    idle: float
    dollars_per_hour: float
    idle_dollars_per_hour: float
    idle_dollars_of_a_day: float


@dataclass(frozen=True)
class Alert:
    name: str
    severity: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    gpus: Gpus | None  # None without recorded GPU series
    teams: tuple[Team, ...]  # the most expensive idle ones first
    runs: tuple[Progress, ...]
    endpoint: Endpoint | Absent
    alerts: tuple[Alert, ...]


class ClusterWatch:
    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus

    def poll(self) -> Cluster:
        return Cluster(self._gpus(), self._teams(), self._runs(), self._endpoint(), self._alerts())

    def _of(self, selector: str) -> str:
        return select(selector, self._prometheus.limits)

    def _sum(self, selector: str, label: str) -> dict[str, float]:
        return self._prometheus.by(label, f"sum by ({label}) ({self._of(selector)})")

    def _total(self, selector: str) -> float | None:
        return self._prometheus.number(f"sum({self._of(selector)})")

    def _gpus(self) -> Gpus | None:
        count = self._total(NODE_GPUS)
        if not count:
            return None
        gpus, busy = self._of(NODE_GPUS), self._of(NODE_UTILIZATION)
        used, total = self._total(NODE_MEMORY_USED), self._total(NODE_MEMORY_TOTAL)
        return Gpus(
            count=count,
            nodes=self._prometheus.number(f"count(group by (cluster, node) ({gpus}))") or 0.0,
            utilization=self._prometheus.number(f"sum({busy} * {gpus}) / sum({gpus})"),
            memory=_share(used, total),
            power=self._total(NODE_POWER),
            idle=self._total(TEAM_IDLE) or 0.0,
            throttled={reason: number for reason, number in sorted(self._sum(THROTTLED, "reason").items()) if number},
            least_busy=self._nodes(f"bottomk({NODES_SHOWN}, avg by (node) ({busy}))", descending=False),
            hottest=self._nodes(f"topk({NODES_SHOWN}, max by (node) ({self._of(NODE_TEMPERATURE)}))", descending=True),
        )

    def _nodes(self, chosen: str, descending: bool) -> tuple[Node, ...]:
        order = self._prometheus.by("node", chosen)
        names = sorted(order, key=lambda name: (-order[name] if descending else order[name], name))
        if not names:
            return ()

        def value(how: str, selector: str) -> dict[str, float]:
            # One matcher per name would be longer, and a regular expression of names needs escapes of its own.
            return self._prometheus.by("node", f"{how} by (node) ({self._of(selector)}) and on (node) {chosen}")

        gpus, busy, power = value("sum", NODE_GPUS), value("avg", NODE_UTILIZATION), value("sum", NODE_POWER)
        used, total, heat = value("sum", NODE_MEMORY_USED), value("sum", NODE_MEMORY_TOTAL), value("max", NODE_TEMPERATURE)
        return tuple(
            Node(
                name,
                gpus.get(name, 0.0),
                busy.get(name),
                _share(used.get(name), total.get(name)),
                power.get(name),
                heat.get(name),
            )
            for name in names
        )

    def _teams(self) -> tuple[Team, ...]:
        gpus, idle, cost, idle_cost = (self._sum(name, "namespace") for name in (TEAM_GPUS, TEAM_IDLE, TEAM_COST, TEAM_IDLE_COST))
        day = self._prometheus.by("namespace", f"sum by (namespace) (sum_over_time({self._of(TEAM_IDLE_DOLLARS)}[1d:5m]))")
        teams = (
            Team(
                name,
                gpus.get(name, 0.0),
                idle.get(name, 0.0),
                cost.get(name, 0.0),
                idle_cost.get(name, 0.0),
                day.get(name, 0.0),
            )
            for name in {*gpus, *day}
        )
        return tuple(sorted(teams, key=lambda team: (-team.idle_dollars_per_hour, -team.idle_dollars_of_a_day, team.name)))

    def _runs(self) -> tuple[Progress, ...]:
        """Runs with steps left. Two clusters may have runs of the same name; the one that is further is shown."""
        steps, planned = self._by_run(metrics.TRAIN_STEP), self._by_run(metrics.TRAIN_STEPS_PLANNED)
        running = sorted(run for run, step in steps.items() if step < planned.get(run, 0.0))[:RUNS_SHOWN]
        if not running:
            return ()
        now = time.time()
        step = self._of(metrics.TRAIN_STEP.exported)
        pace = self._prometheus.by("run", f"max by (run) (deriv({step}[{PACE}]))")
        moved = self._prometheus.by("run", f"max by (run) (changes({step}[{SILENT_S:.0f}s]))")
        speed, mfu = self._by_run(metrics.TRAIN_TOKENS_PER_SECOND), self._by_run(metrics.TRAIN_MFU)
        saved = self._by_run(metrics.TRAIN_CHECKPOINT_TIME)
        losses, validation = (self._course(metric, now) for metric in (metrics.TRAIN_LOSS, metrics.TRAIN_VALIDATION_LOSS))
        return tuple(
            Progress(
                name=run,
                step=int(steps[run]),
                steps=int(planned[run]),
                losses=losses.get(run, ()),
                validation_losses=validation.get(run, ()),
                tokens_per_s=speed.get(run),
                mfu=mfu.get(run),
                seconds_left=(planned[run] - steps[run]) / pace[run] if pace.get(run, 0.0) > 0 else None,
                checkpoint_age=max(0.0, now - saved[run]) if run in saved else None,
                silent_for=0.0 if moved.get(run, 0.0) > 0 else SILENT_S,
            )
            for run in running
        )

    def _by_run(self, metric: Metric) -> dict[str, float]:
        return self._prometheus.by("run", f"max by (run) ({self._of(metric.exported)})")

    def _course(self, metric: Metric, now: float) -> dict[str, tuple[float, ...]]:
        expr = f"max by (run) ({self._of(metric.exported)})"
        return self._prometheus.history("run", expr, now, COURSE_S, COURSE_STEP_S)

    def _endpoint(self) -> Endpoint | Absent:
        up = self._prometheus.query(self._of(metrics.SERVE_REPLICAS.exported))
        if not up:
            return Absent("no series of a gateway")
        usage, running, waiting = (
            self._sum(metric.exported, "replica")
            for metric in (metrics.SERVE_KV_USAGE, metrics.SERVE_RUNNING, metrics.SERVE_WAITING)
        )
        replicas = [
            Replica(name, one.labels.get("role", ""), usage.get(name), running.get(name), waiting.get(name))
            for one in up
            if (name := one.labels.get("replica", ""))
        ]
        return Endpoint(
            models=tuple(sorted({one.labels["model"] for one in up if "model" in one.labels})),
            replicas=tuple(sorted(replicas, key=lambda replica: (replica.role, replica.name))),
            in_flight=self._total(metrics.SERVE_IN_FLIGHT.exported) or 0.0,
            queued=self._total(metrics.SERVE_QUEUED.exported) or 0.0,
            recently=self._recently(),
        )

    def _recently(self) -> Recently:
        clients = f"{metrics.SERVE_REQUESTS.exported}{{route=~{quoted('/v1/.*')}}}"
        answers = self._increase(clients, "status")
        return Recently(
            seconds=WINDOW_S,
            first_token=self._latency(metrics.SERVE_FIRST_TOKEN),
            inter_token=self._latency(metrics.SERVE_INTER_TOKEN),
            requests_per_s=sum(answers.values()) / WINDOW_S,
            prompt_tokens_per_s=sum(self._increase(metrics.SERVE_PROMPT_TOKENS.exported, "model").values()) / WINDOW_S,
            tokens_per_s=sum(self._increase(metrics.SERVE_GENERATED_TOKENS.exported, "model").values()) / WINDOW_S,
            prefills=self._increase(metrics.SERVE_PREFILLS.exported, "where"),
            rejections=self._increase(metrics.SERVE_REJECTIONS.exported, "reason"),
            errors=sum(count for status, count in answers.items() if status >= "500"),
        )

    def _increase(self, selector: str, label: str) -> dict[str, float]:
        expr = f"sum by ({label}) (increase({self._of(selector)}[{WINDOW_S:.0f}s]))"
        return self._prometheus.by(label, expr)

    def _latency(self, metric: Metric) -> Latency | None:
        buckets = f"sum by (le) (rate({self._of(f'{metric.exported}_bucket')}[{WINDOW_S:.0f}s]))"
        p50, p99 = (self._prometheus.number(f"histogram_quantile({share}, {buckets})") for share in (0.5, 0.99))
        return None if p50 is None or p99 is None else Latency(p50, p99)

    def _alerts(self) -> tuple[Alert, ...]:
        """Firing alerts. Those of GPUs, nodes and services may have no label of the chosen cluster and are then left out."""
        firing = self._prometheus.query(self._of(f"ALERTS{{alertstate={quoted('firing')}}}"))
        alerts = (Alert(one.labels.get("alertname", ""), one.labels.get("severity", ""), one.labels) for one in firing)
        return tuple(sorted(alerts, key=lambda alert: (_rank(alert.severity), alert.name)))


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)


def _share(used: float | None, total: float | None) -> float | None:
    return used / total if used is not None and total else None
