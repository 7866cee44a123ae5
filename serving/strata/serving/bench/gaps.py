"""Where the gaps in streams come from, by the server's own histograms before and after a load: at the engine, apart by what it
did beside, and on their way out to the clients. Servers that keep no such histograms have nothing to say."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx
from prometheus_client.parser import text_string_to_metric_families

from strata.platform import metrics
from strata.serving.bench.clients.load import Target
from strata.serving.metrics.telemetry import BESIDE

OUT = "on their way out"
Gaps = dict[str, list[int]]  # how many fell between the bounds of metrics.ITL_BUCKETS, by what was beside
LONGEST = 0.01


@dataclass(frozen=True)
class Row:
    beside: str
    share: float  # of the engine's gaps
    p50: float
    p99: float
    of_longest: float | None  # this kind's share of the engine's longest hundredth


def read(target: Target) -> Gaps:
    try:
        answer = httpx.get(f"http://{target.host}:{target.port}/metrics", timeout=30)
    except httpx.HTTPError:
        return {}
    return parse(answer.text) if answer.status_code == 200 else {}


def parse(text: str) -> Gaps:
    cumulative: defaultdict[str, defaultdict[float, int]] = defaultdict(lambda: defaultdict(int))
    for family in text_string_to_metric_families(text):
        if family.name not in (metrics.SERVE_ENGINE_GAP.name, metrics.SERVE_INTER_TOKEN.name):
            continue
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                cumulative[sample.labels.get("beside", OUT)][float(sample.labels["le"])] += int(sample.value)
    found: Gaps = {}
    for beside, counts in cumulative.items():
        ordered = [counts[bound] for bound in sorted(counts)]
        found[beside] = [ordered[0], *(after - before for before, after in pairwise(ordered))]
    return found


def between(before: Gaps, after: Gaps) -> Gaps:
    """What is new; nothing where a process began anew meanwhile, and its counts with it."""
    new = {
        beside: [b - a for a, b in zip(before[beside], counts, strict=True)]
        for beside, counts in after.items()
        if beside in before
    }
    return new if all(count >= 0 for counts in new.values() for count in counts) else {}


def together(several: Sequence[Gaps]) -> Gaps:
    return {
        beside: [sum(counts) for counts in zip(*(gaps[beside] for gaps in several), strict=True)] for beside in _in_all(several)
    }


def rows(gaps: Mapping[str, Sequence[int]]) -> Iterator[Row]:
    """Those of which there are any. Quantiles are as Prometheus has them: on a line between two bounds."""
    engine = {beside: gaps[beside] for beside in BESIDE if sum(gaps.get(beside, ()))}
    if not engine:
        return
    all_of_it = [sum(counts) for counts in zip(*engine.values(), strict=True)]
    long = quantile(all_of_it, 1 - LONGEST)
    longest = {beside: above(counts, long) for beside, counts in engine.items()}
    for beside, counts in engine.items():
        share = sum(counts) / sum(all_of_it)
        yield Row(beside, share, quantile(counts, 0.5), quantile(counts, 0.99), longest[beside] / (sum(longest.values()) or 1))
    for beside, counts in (("all of them", all_of_it), (OUT, gaps.get(OUT, ()))):
        if sum(counts):
            yield Row(beside, sum(counts) / sum(all_of_it), quantile(counts, 0.5), quantile(counts, 0.99), None)


def quantile(counts: Sequence[int], q: float) -> float:
    wanted, seen = q * sum(counts), 0
    for count, (lower, upper) in zip(counts, pairwise((0.0, *metrics.ITL_BUCKETS)), strict=False):
        if count and seen + count >= wanted:
            return lower + (upper - lower) * (wanted - seen) / count
        seen += count
    return metrics.ITL_BUCKETS[-1]


def above(counts: Sequence[int], limit: float) -> float:
    """How many were longer, likewise."""
    found = float(counts[-1])
    for count, (lower, upper) in zip(counts, pairwise((0.0, *metrics.ITL_BUCKETS)), strict=False):
        found += count * min(max((upper - limit) / (upper - lower), 0.0), 1.0)
    return found


def _in_all(several: Sequence[Gaps]) -> list[str]:
    return [beside for beside in several[0] if all(beside in gaps for gaps in several)] if several else []
