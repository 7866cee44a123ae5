"""Attributes inter-token latency (ITL) to the engine's concurrent work, from the server's Prometheus histograms.

Compares the histograms before and after a load: ITL in the engine, by its concurrent work (label `beside`), and ITL in the
gateway. Servers without these histograms have no rows.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx
from prometheus_client.parser import text_string_to_metric_families

from strata.platform import metrics
from strata.serving.bench.clients.load import Target
from strata.serving.metrics.telemetry import BESIDE

GATEWAY = "on their way out"  # a key in the JSON file: ITL as the gateway sent the tokens
Histograms = dict[str, list[int]]  # counts between the bounds of metrics.ITL_BUCKETS, by concurrent work
LONGEST = 0.01  # the slowest 1% of the engine's ITLs


@dataclass(frozen=True)
class Row:
    beside: str
    share: float  # of the engine's ITLs
    p50: float
    p99: float
    of_longest: float | None  # share of the engine's slowest 1%


def read(target: Target) -> Histograms:
    try:
        answer = httpx.get(f"http://{target.host}:{target.port}/metrics", headers=target.headers, timeout=30)
    except httpx.HTTPError:
        return {}
    return parse(answer.text) if answer.status_code == 200 else {}


def parse(text: str) -> Histograms:
    cumulative: defaultdict[str, defaultdict[float, int]] = defaultdict(lambda: defaultdict(int))
    for family in text_string_to_metric_families(text):
        if family.name not in (metrics.SERVE_ENGINE_GAP.name, metrics.SERVE_INTER_TOKEN.name):
            continue
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                cumulative[sample.labels.get("beside", GATEWAY)][float(sample.labels["le"])] += int(sample.value)
    found: Histograms = {}
    for beside, counts in cumulative.items():
        ordered = [counts[bound] for bound in sorted(counts)]
        found[beside] = [ordered[0], *(after - before for before, after in pairwise(ordered))]
    return found


def between(before: Histograms, after: Histograms) -> Histograms:
    """Difference of the counts; empty if a process restarted in between and its counts with it."""
    new = {
        beside: [b - a for a, b in zip(before[beside], counts, strict=True)]
        for beside, counts in after.items()
        if beside in before
    }
    return new if all(count >= 0 for counts in new.values() for count in counts) else {}


def merged(several: Sequence[Histograms]) -> Histograms:
    return {
        beside: [sum(counts) for counts in zip(*(histograms[beside] for histograms in several), strict=True)]
        for beside in _in_all(several)
    }


def rows(histograms: Mapping[str, Sequence[int]]) -> Iterator[Row]:
    """One row per non-empty histogram. Quantiles are interpolated linearly within a bucket, as in Prometheus."""
    engine = {beside: histograms[beside] for beside in BESIDE if sum(histograms.get(beside, ()))}
    if not engine:
        return
    total = [sum(counts) for counts in zip(*engine.values(), strict=True)]
    long = quantile(total, 1 - LONGEST)
    longest = {beside: above(counts, long) for beside, counts in engine.items()}
    for beside, counts in engine.items():
        share = sum(counts) / sum(total)
        yield Row(beside, share, quantile(counts, 0.5), quantile(counts, 0.99), longest[beside] / (sum(longest.values()) or 1))
    for beside, counts in (("engine total", total), (GATEWAY, histograms.get(GATEWAY, ()))):
        if sum(counts):
            yield Row(beside, sum(counts) / sum(total), quantile(counts, 0.5), quantile(counts, 0.99), None)


def quantile(counts: Sequence[int], q: float) -> float:
    wanted, seen = q * sum(counts), 0
    for count, (lower, upper) in zip(counts, pairwise((0.0, *metrics.ITL_BUCKETS)), strict=False):
        if count and seen + count >= wanted:
            return lower + (upper - lower) * (wanted - seen) / count
        seen += count
    return metrics.ITL_BUCKETS[-1]


def above(counts: Sequence[int], limit: float) -> float:
    """Number of values above the limit, interpolated likewise."""
    found = float(counts[-1])
    for count, (lower, upper) in zip(counts, pairwise((0.0, *metrics.ITL_BUCKETS)), strict=False):
        found += count * min(max((upper - limit) / (upper - lower), 0.0), 1.0)
    return found


def _in_all(several: Sequence[Histograms]) -> list[str]:
    return [beside for beside in several[0] if all(beside in histograms for histograms in several)] if several else []
