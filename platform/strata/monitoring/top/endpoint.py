"""Recent rates and latencies of an endpoint, from differences of its `/metrics` between polls.

Counters and histograms count from the start of a process. Their differences count from the previous poll.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from strata.platform import metrics
from strata.platform.errors import UserError
from strata.platform.metrics import ServeMetric

# Window of rates and latencies. Over a single second, an endpoint with little traffic would often show none.
WINDOW_S = 10.0
TIMEOUT_S = 2.0
PREFIX = "strata_serve_"  # skips thousands of lines of vLLM's series, which are not shown

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]


@dataclass(frozen=True)
class Latency:
    p50: float  # seconds
    p99: float


@dataclass(frozen=True)
class Recently:
    """Traffic of the last `seconds`. A latency is None if nothing was measured."""

    seconds: float
    first_token: Latency | None
    inter_token: Latency | None
    requests_per_s: float
    prompt_tokens_per_s: float
    tokens_per_s: float
    prefills: Mapping[str, float]  # by place: local, remote
    rejections: Mapping[str, float]  # by reason
    errors: float  # responses with status 500 or above


@dataclass(frozen=True)
class Replica:
    name: str
    role: str
    kv_usage: float | None  # 0 to 1
    running: float | None
    waiting: float | None


@dataclass(frozen=True)
class Endpoint:
    models: tuple[str, ...]
    replicas: tuple[Replica, ...]
    in_flight: float
    queued: float
    recently: Recently | None  # None at the first poll


@dataclass(frozen=True)
class Absent:
    reason: str


class EndpointWatch:
    """Polls an endpoint, also across restarts: after a failed poll, earlier samples are discarded and not subtracted."""

    def __init__(self, url: str) -> None:
        self._url = f"{checked(url)}/metrics"
        self._client = httpx.Client(timeout=TIMEOUT_S)
        self._before: tuple[float, Samples] | None = None
        self._recent: deque[tuple[float, Samples]] = deque()  # (seconds, increase in them)

    def close(self) -> None:
        self._client.close()

    def poll(self) -> Endpoint | Absent:
        try:
            answer = self._client.get(self._url)
            answer.raise_for_status()
            now, samples = time.monotonic(), parse(answer.text)
        except httpx.HTTPStatusError as error:
            return self._forget(f"{self._url} returned status {error.response.status_code}")
        except httpx.HTTPError as error:
            return self._forget(str(error) or type(error).__name__)
        except ValueError:
            return self._forget(f"{self._url} is not in the Prometheus text format")
        if not samples:
            return self._forget(f"{self._url} has no Strata series")
        if self._before:
            then, before = self._before
            self._recent.append((now - then, increase(before, samples)))
            while sum(seconds for seconds, _ in self._recent) - self._recent[0][0] >= WINDOW_S:
                self._recent.popleft()
        self._before = now, samples
        return summarize(samples, self._recent)

    def _forget(self, reason: str) -> Absent:
        self._before = None
        self._recent.clear()
        return Absent(reason)


def checked(url: str) -> str:
    wrong = UserError(
        f"--url '{url}' is not the address of an endpoint.", "Write it as http://HOST:PORT, such as --url http://127.0.0.1:8000."
    )
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:
        raise wrong from None
    if address.scheme not in ("http", "https") or not address.host:
        raise wrong
    return url.rstrip("/")


def parse(text: str) -> Samples:
    ours = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(PREFIX))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(ours)
        for sample in family.samples
    }


def increase(before: Samples, after: Samples) -> Samples:
    """Increase of counters and histogram buckets between two polls.

    A value that fell belongs to a restarted process and counts in full, as in Prometheus. A new series counts in full if its
    replica is known. A replica that is new to this poll counts as zero, because it may have run for hours."""
    known = {dict(labels).get("replica") for _, labels in before}
    grown: Samples = {}
    for (name, labels), value in after.items():
        if not name.endswith(("_total", "_bucket")):
            continue
        then = before.get((name, labels), 0.0 if dict(labels).get("replica") in known else value)
        grown[name, labels] = value - then if value >= then else value
    return grown


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Quantile of cumulative counts by upper bound, as PromQL's `histogram_quantile`: linear within a bucket, and the highest
    finite bound beyond it."""
    bounds = sorted(buckets)
    if not bounds or not math.isinf(bounds[-1]) or buckets[bounds[-1]] <= 0:
        return None
    rank = share * buckets[bounds[-1]]
    at = next(number for number, bound in enumerate(bounds) if buckets[bound] >= rank)
    if math.isinf(bounds[at]):
        return bounds[at - 1] if at else None
    low, below = (bounds[at - 1], buckets[bounds[at - 1]]) if at else (0.0, 0.0)
    inside = buckets[bounds[at]] - below
    return low + (bounds[at] - low) * ((rank - below) / inside if inside else 1.0)


def summarize(samples: Samples, recent: Iterable[tuple[float, Samples]]) -> Endpoint:
    recent = list(recent)
    return Endpoint(
        models=tuple(sorted({dict(labels)["model"] for _, labels in samples if "model" in dict(labels)})),
        replicas=_replicas(samples),
        in_flight=sum(_by(samples, metrics.SERVE_IN_FLIGHT, "replica").values()),
        queued=sum(_by(samples, metrics.SERVE_QUEUED, "replica").values()),
        recently=_recently(recent) if recent else None,
    )


def _recently(recent: list[tuple[float, Samples]]) -> Recently:
    seconds = sum(length for length, _ in recent)
    total: Counter[tuple[str, Labels]] = Counter()
    for _, grown in recent:
        total.update(grown)
    answers = _by(_of_clients(total), metrics.SERVE_REQUESTS, "status")
    return Recently(
        seconds=seconds,
        first_token=_latency(total, metrics.SERVE_FIRST_TOKEN),
        inter_token=_latency(total, metrics.SERVE_INTER_TOKEN),
        requests_per_s=sum(answers.values()) / seconds,
        prompt_tokens_per_s=sum(_by(total, metrics.SERVE_PROMPT_TOKENS, "replica").values()) / seconds,
        tokens_per_s=sum(_by(total, metrics.SERVE_GENERATED_TOKENS, "replica").values()) / seconds,
        prefills=_by(total, metrics.SERVE_PREFILLS, "where"),
        rejections=_by(total, metrics.SERVE_REJECTIONS, "reason"),
        errors=sum(count for status, count in answers.items() if status >= "500"),
    )


def _of_clients(samples: Mapping[tuple[str, Labels], float]) -> Samples:
    """Requests of clients only, without probes and scrapes (this command scrapes too)."""
    return {key: value for key, value in samples.items() if dict(key[1]).get("route", "").startswith("/v1/")}


def _replicas(samples: Samples) -> tuple[Replica, ...]:
    up = [dict(labels) for name, labels in samples if name == metrics.SERVE_REPLICAS.exported]
    usage, running, waiting = (
        _by(samples, metric, "replica") for metric in (metrics.SERVE_KV_USAGE, metrics.SERVE_RUNNING, metrics.SERVE_WAITING)
    )
    listed = (
        Replica(one["replica"], one["role"], *(values.get(one["replica"]) for values in (usage, running, waiting))) for one in up
    )
    return tuple(sorted(listed, key=lambda replica: (replica.role, replica.name)))


def _latency(samples: Mapping[tuple[str, Labels], float], metric: ServeMetric) -> Latency | None:
    buckets = {float(bound): count for bound, count in _sum(samples, f"{metric.exported}_bucket", "le").items()}
    p50, p99 = quantile(buckets, 0.5), quantile(buckets, 0.99)
    return None if p50 is None or p99 is None else Latency(p50, p99)


def _by(samples: Mapping[tuple[str, Labels], float], metric: ServeMetric, label: str) -> dict[str, float]:
    return _sum(samples, metric.exported, label)


def _sum(samples: Mapping[tuple[str, Labels], float], name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for (sampled, labels), value in samples.items():
        if sampled == name:
            key = dict(labels)[label]
            sums[key] = sums.get(key, 0.0) + value
    return sums
