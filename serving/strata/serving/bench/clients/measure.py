"""Throughput, TTFT, ITL, TPOT and goodput from the clients' records."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy

from strata.serving.bench.clients.load import Record


@dataclass(frozen=True)
class Slo:
    ttft_s: float
    itl_s: float  # of a request's mean ITL (TPOT)

    def met_by(self, record: Record) -> bool:
        return record.error is None and ttft(record) <= self.ttft_s and mean_itl(record) <= self.itl_s


@dataclass(frozen=True)
class Summary:
    """Results of one load level. Latencies are in seconds, and None if no request succeeded.

    ITL is the time between two events of a stream, as in `vllm bench serve`. A server that sends several events together has
    ITLs of zero, so the summary also has `mean_itl` (TPOT: mean ITL per request) and `tokens_at_once` (tokens per read)."""

    requests: int
    errors: int
    first_error: str | None
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    mean_itl_p50: float | None
    end_to_end_p50: float | None
    goodput_share: float
    goodput_per_s: float
    events_per_s: float
    tokens_per_event: float | None
    tokens_at_once: float | None
    remote_share: float | None = None  # share of prompts with remote prefill, if the server reports it


def median(summaries: Sequence[Summary]) -> Summary:
    """Medians over several rounds of the same load; sums of counts."""
    found: dict[str, Any] = {}
    for field in fields(Summary):
        values = [value for one in summaries if (value := getattr(one, field.name)) is not None]
        if field.name in ("requests", "errors"):
            found[field.name] = sum(values)
        elif field.name == "first_error" or not values:
            found[field.name] = values[0] if values else None
        else:
            found[field.name] = statistics.median(values)
    return Summary(**found)


def ttft(record: Record) -> float:
    return record.arrivals[0] - record.start


def mean_itl(record: Record) -> float:
    return (record.arrivals[-1] - record.arrivals[0]) / max(record.tokens - 1, 1)


def summarise(records: Sequence[Record], slo: Slo) -> Summary:
    """Rates are over the time from the first request to the end of the last. Failed requests count only in that time."""
    assert records
    seconds = max(record.end for record in records) - min(record.start for record in records)
    good = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    tokens = sum(record.tokens for record in good)
    events = sum(len(record.arrivals) for record in good)
    reads = sum(len(set(record.arrivals)) for record in good)
    itls = numpy.concatenate([numpy.diff(record.arrivals) for record in good]) if good else numpy.array([])
    prefills = [record.prefill for record in good if record.prefill]
    within = sum(slo.met_by(record) for record in records)
    return Summary(
        requests=len(records),
        errors=len(errors),
        first_error=errors[0] if errors else None,
        seconds=seconds,
        requests_per_s=len(good) / seconds,
        tokens_per_s=tokens / seconds,
        ttft_p50=percentile([ttft(record) for record in good], 50),
        ttft_p99=percentile([ttft(record) for record in good], 99),
        itl_p50=percentile(itls, 50),
        itl_p99=percentile(itls, 99),
        mean_itl_p50=percentile([mean_itl(record) for record in good], 50),
        end_to_end_p50=percentile([record.end - record.start for record in good], 50),
        goodput_share=within / len(records),
        goodput_per_s=within / seconds,
        events_per_s=events / seconds,
        tokens_per_event=tokens / events if events else None,
        tokens_at_once=tokens / reads if reads else None,
        remote_share=prefills.count("remote") / len(prefills) if prefills else None,
    )


def by_kind(records: Sequence[Record], slo: Slo) -> dict[str, Summary]:
    """One summary per kind of request; empty if there is only one kind."""
    kinds = sorted({record.kind for record in records})
    if len(kinds) == 1:
        return {}
    return {kind: summarise([record for record in records if record.kind == kind], slo) for kind in kinds}


def percentile(values: "Sequence[float] | numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]", share: float) -> float | None:
    return float(numpy.percentile(values, share)) if len(values) else None
