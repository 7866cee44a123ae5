"""Figures of a load that are compared: throughput, time to first token and inter-token latency."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from strata.platform.errors import UserError
from strata.serving.bench.clients import measure
from strata.serving.bench.clients.load import Record


@dataclass(frozen=True)
class Figures:
    """None where a record of a benchmark lacks the figure."""

    requests_per_s: float
    tokens_per_s: float
    ttft_p50: float
    ttft_p90: float | None
    itl_p50: float
    itl_mean: float


NAMES = tuple(field.name for field in fields(Figures))
BARS = ("tokens_per_s", "ttft_p50")  # figures whose errors have a bound


def of(records: Sequence[Record]) -> Figures:
    """Figures of a measured load. A failed request is an error: the load would not be the simulated one."""
    if failed := next((record.error for record in records if record.error is not None), None):
        raise UserError(
            f"A request failed: {failed}.", "See the log of the endpoint; lower --concurrency if it rejects requests."
        )
    seconds = max(record.end for record in records) - min(record.start for record in records)
    ttft = [measure.ttft(record) for record in records]
    # Several tokens of one event or one read count as that many equal gaps.
    gaps = np.concatenate([_gaps(record) for record in records])
    return Figures(
        len(records) / seconds,
        sum(record.tokens for record in records) / seconds,
        float(np.percentile(ttft, 50)),
        float(np.percentile(ttft, 90)),
        float(np.percentile(gaps, 50)),
        float(gaps.mean()),
    )


def _gaps(record: Record) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Gaps between reads of a stream, each for every token that it brought."""
    times, counts = np.unique(record.arrivals, return_counts=True)
    if len(times) < 2:
        return np.array([0.0])
    return np.repeat(np.diff(times) / counts[1:], counts[1:])


def median(rounds: Sequence[Figures]) -> Figures:
    medians = []
    for name in NAMES:
        values = [value for each in rounds if (value := getattr(each, name)) is not None]
        medians.append(statistics.median(values) if values else None)
    return Figures(*medians)  # type: ignore[arg-type]
