"""Results of a simulation: every request's latencies, the engines' counters, and their summary."""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from strata.serving.scaling.sizing import Slo
from strata.serving.simulation.histogram import Histogram

PERCENTILES = (50, 90, 99)


class Results:
    def __init__(self, slo: Slo | None = None) -> None:
        self.slo = slo
        self.slow = 0  # completed requests that missed the SLO
        self.sent = self.completed = self.rejected = self.too_long = self.failed = 0
        self.input_tokens = self.output_tokens = 0  # of completed requests
        self.queried_tokens = self.hit_tokens = self.preemptions = self.steps = self.events = 0
        self.retried = self.migrated = 0
        self.ttft_s, self.queue_s, self.latency_s = array("d"), array("d"), array("d")
        self.itl = Histogram()
        self.prefills: Counter[tuple[str, str]] = Counter()  # by place and reason
        self.routed: Counter[str] = Counter()  # requests by the reason of their replica's choice
        self.began_at: float | None = None
        self.ended_at = 0.0
        self.pools: dict[str, PoolUse] = {}
        self.tenants: dict[str, TenantResults] = {}

    @property
    def ended(self) -> int:
        return self.completed + self.rejected + self.too_long + self.failed

    @property
    def seconds(self) -> float:
        return self.ended_at - (self.began_at or 0.0)

    def judge(self, ttft_s: float, latency_s: float, tokens: int) -> None:
        """Counts a completed request that missed the SLO: its first token came after `ttft_s`, or its last one later than
        `itl_s` for each further token allows. An average over the few gaps of a short answer would depend on a single step."""
        slo = self.slo
        if slo is not None and (ttft_s > slo.ttft_s or latency_s > slo.ttft_s + (tokens - 1) * slo.itl_s):
            self.slow += 1

    def _slo(self) -> dict[str, Any]:
        if self.slo is None:
            return {}
        violations = self.slow + self.rejected + self.failed
        share = violations / (self.sent - self.too_long) if self.sent > self.too_long else 0.0
        return {"slo": {"ttft_s": self.slo.ttft_s, "itl_s": self.slo.itl_s, "violations": violations, "share": share}}

    def summary(self) -> dict[str, Any]:
        seconds = self.seconds or 1.0
        return self._slo() | {
            "simulated_s": self.seconds,
            "requests": {
                "sent": self.sent,
                "completed": self.completed,
                "rejected": self.rejected,
                "too_long": self.too_long,
                "failed": self.failed,
            },
            "requests_per_s": self.completed / seconds,
            "input_tokens_per_s": self.input_tokens / seconds,
            "output_tokens_per_s": self.output_tokens / seconds,
            "ttft_s": _percentiles(self.ttft_s),
            "itl_s": {
                "mean": self.itl.total / self.itl.weight if self.itl.weight else None,
                **{f"p{share}": self.itl.percentile(share / 100) for share in PERCENTILES},
            },
            "queue_s": _percentiles(self.queue_s),
            "latency_s": _percentiles(self.latency_s),
            "prefix_hit_rate": self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0,
            "preemptions": self.preemptions,
            "retried": self.retried,
            "migrated": self.migrated,
            "prefills": {f"{where}: {reason}": count for (where, reason), count in sorted(self.prefills.items())},
            "tenants": {name: tenant.summary() for name, tenant in self.tenants.items()},
            "routed": dict(sorted(self.routed.items())),
            "pools": {name: pool.summary() for name, pool in self.pools.items()},
            "engine_steps": self.steps,
            "events": self.events,
        }


class TenantResults:
    def __init__(self) -> None:
        self.completed = self.rejected = 0
        self.ttft_s = array("d")
        self.itl = Histogram()

    def summary(self) -> dict[str, Any]:
        itl = {f"p{share}": self.itl.percentile(share / 100) for share in PERCENTILES}
        return {"completed": self.completed, "rejected": self.rejected, "ttft_s": _percentiles(self.ttft_s), "itl_s": itl}


class PoolUse:
    """Use of one pool, summed over its replicas, dead ones included."""

    def __init__(self) -> None:
        self.replicas = 0  # that joined; with autoscaling, the most at a time
        self.start_s = 0.0
        self.up_s = self.busy_s = self.block_seconds = self.block_capacity_seconds = self.peak = 0.0

    def summary(self) -> dict[str, Any]:
        return {
            "replicas": self.replicas,
            "replica_hours": (self.start_s + self.up_s) / 3600,
            "utilisation": self.busy_s / self.up_s if self.up_s else 0.0,
            "kv_use": self.block_seconds / self.block_capacity_seconds if self.block_capacity_seconds else 0.0,
            "kv_use_peak": self.peak,
        }


def _percentiles(values: Iterable[float]) -> Mapping[str, float | None]:
    found = np.asarray(values)
    if not found.size:
        return {"mean": None} | {f"p{share}": None for share in PERCENTILES}
    return {"mean": float(found.mean())} | {f"p{share}": float(np.percentile(found, share)) for share in PERCENTILES}
