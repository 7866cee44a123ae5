"""Prometheus metrics of a gateway (client side) and of a replica (engine side), of text or of pictures.

Names, labels and buckets are defined in `strata.platform.metrics`. `text()` returns all metrics of a process. Not thread-safe:
call it from the event loop only.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from strata.platform import metrics
from strata.platform.metrics import ServeMetric
from strata.serving.routing import policy
from strata.serving.routing.kv.expected_wait import REASONS

Labels = tuple[str, ...]
ROUTES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/images/generations", "/v1/models"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank"),
    *("/tokenize", "/detokenize", "/health", "/metrics"),
)
MAX_TENANTS = 100  # that have labels of their own
OTHER_TENANTS = "(others)"  # no tenant can have this name
MIGRATIONS = ("continued", "restarted", "refused")
EVICTIONS = ("memory", "removed")  # of an adapter
BATCH_ENDINGS = ("completed", "failed", "expired")  # of a request of a batch
OUTCOMES = ("completed", "cancelled", "failed")  # of a picture
# Possible causes of a longer inter-token latency, most likely first: prompt tokens in the same step; a KV transfer into this
# engine; a remote prefill, which matters if both engines share a GPU.
BESIDE = ("prefill", "hand-over", "pool-prefill", "nothing")


class Gateway:
    """Metrics measured at the client side, of one model."""

    def __init__(self, model: str, replica: str, main: bool = True) -> None:
        """A gateway counts as a replica of its `main` model only."""
        self._series = _Series((model, "gateway", replica), metrics.SERVING_GATEWAY)
        if main:
            self.batch_requests(0, 0)
            for ending in BATCH_ENDINGS:
                self._series.add(metrics.SERVE_BATCH_REQUESTS, 0, ending)
        else:
            self._series.set(metrics.SERVE_REPLICAS, 0)
        self._produced = 0
        self._tenants: set[str] = set()
        # Prometheus sees no increase in a counter that appears with its first event, so known label values start at zero.
        for outcome in MIGRATIONS:
            self._series.add(metrics.SERVE_MIGRATIONS, 0, outcome)
        for reason in REASONS:
            self._series.add(metrics.SERVE_ROUTED, 0, reason)
        self._arrivals = self._answered = 0

    def arrived(self) -> None:
        """A valid request, before it is admitted or rejected."""
        self._arrivals += 1

    def demand(self) -> dict[str, int]:
        """Counts for the autoscaler, in the words of `scaling.demand.Seen`."""
        return {
            "arrivals": self._arrivals,
            "ended": self._answered,
            "prompt_tokens": int(self._series.value(metrics.SERVE_PROMPT_TOKENS)),
            "output_tokens": int(self._series.value(metrics.SERVE_GENERATED_TOKENS)),
            "in_flight": int(self._series.value(metrics.SERVE_IN_FLIGHT)),
            "waiting": int(self._series.value(metrics.SERVE_QUEUED)),
        }

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        route = route if route in ROUTES else "other"  # clients choose paths, so unknown ones share a label value
        self._series.add(metrics.SERVE_REQUESTS, 1, route, str(status))
        self._series.observe(metrics.SERVE_REQUEST, seconds, route)

    def first_token(self, seconds: float) -> None:
        self._series.observe(metrics.SERVE_FIRST_TOKEN, seconds)

    def inter_token_latencies(self, seconds: Sequence[float]) -> None:
        """Records all latencies of a stream at its end: one by one they would cost more than sending the tokens."""
        self._series.observe_all(metrics.SERVE_INTER_TOKEN, seconds)

    def tokens(self, prompt: int, generated: int) -> None:
        self._answered += 1
        self._series.add(metrics.SERVE_PROMPT_TOKENS, prompt)
        self._series.add(metrics.SERVE_GENERATED_TOKENS, generated)

    def produced(self, count: int) -> None:
        """Counts tokens or pictures when they are sent; `tokens` counts those of a stream at its end."""
        self._produced += count

    def totals(self) -> dict[str, float]:
        """Numbers of this gateway from which a reader computes rates: the page, and other gateways for it."""
        return {
            "in_flight": self._series.value(metrics.SERVE_IN_FLIGHT),
            "queued": self._series.value(metrics.SERVE_QUEUED),
            "produced": self._produced,
            "first_tokens": self._series.count(metrics.SERVE_FIRST_TOKEN),
            "first_token_seconds": self._series.sum(metrics.SERVE_FIRST_TOKEN),
        }

    def queued(self, seconds: float) -> None:
        self._series.observe(metrics.SERVE_QUEUE, seconds)

    def in_flight(self) -> AbstractContextManager[None]:
        return self._series.counted(metrics.SERVE_IN_FLIGHT)

    def in_queue(self) -> AbstractContextManager[None]:
        return self._series.counted(metrics.SERVE_QUEUED)

    def rejected(self, reason: str) -> None:
        self._series.add(metrics.SERVE_REJECTIONS, 1, reason)

    def batch_requests(self, waiting: int, running: int) -> None:
        self._series.set(metrics.SERVE_BATCH_WAITING, waiting)
        self._series.set(metrics.SERVE_BATCH_RUNNING, running)

    def batch_request_ended(self, ending: str) -> None:
        self._series.add(metrics.SERVE_BATCH_REQUESTS, 1, ending)

    def retried(self, reason: str) -> None:
        self._series.add(metrics.SERVE_RETRIES, 1, reason)

    def routed(self, reason: str) -> None:
        self._series.add(metrics.SERVE_ROUTED, 1, reason)

    def migrated(self, outcome: str) -> None:
        self._series.add(metrics.SERVE_MIGRATIONS, 1, outcome)

    def disconnected(self) -> None:
        self._series.add(metrics.SERVE_DISCONNECTS, 1)

    def tenant_answered(self, tenant: str, status: int, tokens: tuple[int, int] | None, first_token_s: float | None) -> None:
        name = self._tenant(tenant)
        self._series.add(metrics.SERVE_TENANT_REQUESTS, 1, name, str(status))
        for direction, count in zip(("input", "output"), tokens or (0, 0), strict=True):
            self._series.add(metrics.SERVE_TENANT_TOKENS, count, name, direction)
        if first_token_s is not None:
            self._series.observe(metrics.SERVE_TENANT_FIRST_TOKEN, first_token_s, name)

    def tenant_refused(self, tenant: str, limit: str) -> None:
        self._series.add(metrics.SERVE_TENANT_REFUSALS, 1, self._tenant(tenant), limit)

    def tenant_running(self, tenant: str) -> AbstractContextManager[None]:
        return self._series.counted(metrics.SERVE_TENANT_RUNNING, self._tenant(tenant))

    def tenant_queued(self, tenant: str) -> AbstractContextManager[None]:
        return self._series.counted(metrics.SERVE_TENANT_QUEUED, self._tenant(tenant))

    def _tenant(self, name: str) -> str:
        """Label of a tenant. The number of tenants has no bound, that of series must have one."""
        if name in self._tenants or len(self._tenants) < MAX_TENANTS:
            self._tenants.add(name)
            return name
        return OTHER_TENANTS

    def text(self) -> str:
        return self._series.text()


class Replica:
    """Metrics measured at one engine. `engine_stats.py` records those of vLLM's scheduler."""

    def __init__(self, model: str, role: str, replica: str) -> None:
        self._series = _Series((model, role, replica), metrics.SERVING_ENGINE)
        if role == "decode":
            for where, reasons in (("local", policy.LOCAL), ("remote", policy.REMOTE)):
                for reason in reasons:
                    self._series.add(metrics.SERVE_PREFILLS, 0, where, reason)
            for beside in BESIDE:
                self.inter_token_latencies((), beside)
        else:
            self._series.add(metrics.SERVE_PREFILLS, 0, "local", policy.ON_STANDBY)

        for reason in EVICTIONS:
            self._series.add(metrics.SERVE_ADAPTER_EVICTIONS, 0, reason)

    def adapters(self, loaded: int, waiting: int) -> None:
        self._series.set(metrics.SERVE_ADAPTERS, loaded)
        self._series.set(metrics.SERVE_ADAPTERS_WAITING, waiting)

    def adapter_loaded(self, seconds: float) -> None:
        self._series.observe(metrics.SERVE_ADAPTER_LOAD, seconds)

    def adapter_evicted(self, reason: str) -> None:
        self._series.add(metrics.SERVE_ADAPTER_EVICTIONS, 1, reason)

    def prefilled(self, where: str, reason: str) -> None:
        self._series.add(metrics.SERVE_PREFILLS, 1, where, reason)

    def remote_prefill(self, seconds: float) -> None:
        self._series.observe(metrics.SERVE_REMOTE_PREFILL, seconds)

    def remote_prefill_failed(self) -> None:
        self._series.add(metrics.SERVE_REMOTE_PREFILL_FAILURES, 1)

    def inter_token_latencies(self, seconds: Sequence[float], beside: str) -> None:
        """Records one step: the latency of each stream, and what ran beside it."""
        self._series.observe_all(metrics.SERVE_ENGINE_GAP, seconds, beside)

    def load(self, running: int, waiting: int, kv_usage: float) -> None:
        self._series.set(metrics.SERVE_RUNNING, running)
        self._series.set(metrics.SERVE_WAITING, waiting)
        self._series.set(metrics.SERVE_KV_USAGE, kv_usage)

    def prefix_looked_up(self, tokens: int, hits: int) -> None:
        self._series.add(metrics.SERVE_PREFIX_QUERIED, tokens)
        self._series.add(metrics.SERVE_PREFIX_HIT, hits)

    def found_in_tier(self, tier: str, tokens: float) -> None:
        self._series.add(metrics.SERVE_TIER_HIT, tokens, tier)

    def drafted(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Adds the drafts of a step, by position."""
        for number, (made, right) in enumerate(zip(drafted, accepted, strict=True), start=1):
            self._series.add(metrics.SERVE_DRAFTED, made, str(number))
            self._series.add(metrics.SERVE_ACCEPTED, right, str(number))

    def kv_moved(self, sizes: Sequence[float], seconds: Sequence[float]) -> None:
        self._series.add(metrics.SERVE_KV_BYTES, sum(sizes))
        self._series.observe_all(metrics.SERVE_KV_SECONDS, seconds)

    def kv_lost(self, failed: int, expired: int) -> None:
        self._series.add(metrics.SERVE_KV_FAILURES, failed)
        self._series.add(metrics.SERVE_KV_EXPIRED, expired)

    def text(self) -> str:
        return self._series.text()


class Pictures:
    """Metrics measured at one replica of a picture model."""

    def __init__(self, model: str, replica: str) -> None:
        self._series = _Series((model, "pictures", replica), metrics.SERVING_PICTURES)
        for outcome in OUTCOMES:
            self.ended(outcome, 0)

    def ended(self, outcome: str, pictures: int = 1) -> None:
        self._series.add(metrics.SERVE_PICTURES, pictures, outcome)

    def load(self, running: int, waiting: int) -> None:
        self._series.set(metrics.SERVE_PICTURES_RUNNING, running)
        self._series.set(metrics.SERVE_PICTURES_WAITING, waiting)

    def batch_began(self, pictures: int) -> None:
        self._series.add(metrics.SERVE_PICTURE_BATCHES, 1)
        self._series.add(metrics.SERVE_PICTURES_BATCHED, pictures)

    def stepped(self, pictures: int, seconds: float) -> None:
        self._series.add(metrics.SERVE_PICTURE_STEPS, pictures)
        self._series.observe(metrics.SERVE_PICTURE_STEP, seconds)

    def workers_restarted(self) -> None:
        self._series.add(metrics.SERVE_WORKER_RESTARTS, 1)

    def text(self) -> str:
        return self._series.text()


class _Buckets:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self._counts[np.searchsorted(self._bounds, value)] += 1
        self.sum += value

    def add_all(self, values: Sequence[float]) -> None:
        array = np.asarray(values, dtype=np.float64)
        self._counts += np.bincount(np.searchsorted(self._bounds, array), minlength=len(self._counts))
        self.sum += float(array.sum())

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def cumulative(self) -> list[tuple[str, float]]:
        names = [*(str(bound) for bound in self._bounds.tolist()), "+Inf"]
        return list(zip(names, self._counts.cumsum().tolist(), strict=True))


class _Series(Collector):
    """Metric values of one process. prometheus_client's Counter and Histogram cost a lock and a label lookup per value (a
    histogram cannot record many values in one call) and add a `_created` series to every series."""

    def __init__(self, labels: Labels, recorded: Sequence[ServeMetric]) -> None:
        self._labels = labels  # labels of every series of this process, before its own
        self._metrics = (metrics.SERVE_REPLICAS, *recorded)
        self._values: dict[str, dict[Labels, float]] = {metric.name: {} for metric in self._metrics}
        self._buckets: dict[str, dict[Labels, _Buckets]] = {metric.name: {} for metric in self._metrics}
        for metric in self._metrics:
            if len(metric.labels) > len(labels):
                continue
            if metric.kind == "histogram":
                self._histogram(metric, ())
            else:
                self.set(metric, 0)
        self.set(metrics.SERVE_REPLICAS, 1)

    def add(self, metric: ServeMetric, amount: float, *labels: str) -> None:
        values = self._values[metric.name]
        values[labels] = values.get(labels, 0) + amount

    def set(self, metric: ServeMetric, value: float, *labels: str) -> None:
        self._values[metric.name][labels] = value

    @contextmanager
    def counted(self, metric: ServeMetric, *labels: str) -> Iterator[None]:
        self.add(metric, 1, *labels)
        try:
            yield
        finally:
            self.add(metric, -1, *labels)

    def value(self, metric: ServeMetric) -> float:
        return self._values[metric.name][()]

    def count(self, metric: ServeMetric) -> int:
        return self._histogram(metric, ()).count

    def sum(self, metric: ServeMetric) -> float:
        return self._histogram(metric, ()).sum

    def observe(self, metric: ServeMetric, value: float, *labels: str) -> None:
        self._histogram(metric, labels).add(value)

    def observe_all(self, metric: ServeMetric, values: Sequence[float], *labels: str) -> None:
        self._histogram(metric, labels).add_all(values)

    def _histogram(self, metric: ServeMetric, labels: Labels) -> _Buckets:
        family = self._buckets[metric.name]
        if labels not in family:
            family[labels] = _Buckets(metric.buckets)
        return family[labels]

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
                for labels, buckets in self._buckets[metric.name].items():
                    histogram.add_metric((*self._labels, *labels), buckets.cumulative(), buckets.sum)
                yield histogram
                continue
            family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                metric.name, metric.help, labels=metric.labels
            )
            for labels, value in self._values[metric.name].items():
                family.add_metric((*self._labels, *labels), value)
            yield family

    def text(self) -> str:
        return generate_latest(self).decode()
