"""Collective cost model against a published all-reduce curve of 8 x H200. See `published/README.md`."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from strata.planner.collectives.cost import cost, links
from strata.planner.collectives.patterns import Place
from strata.platform.hardware import catalogue as hardware

CURVE = Path(__file__).parent / "published" / "allreduce_8xh200.csv"
RANKS = 8


@dataclass(frozen=True)
class Row:
    bytes: int
    measured: float  # seconds
    measured_busbw: float
    predicted: float
    predicted_busbw: float
    algorithm: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def published_allreduce() -> list[Row]:
    """Rows of the curve. The benchmark waits for every call, so the launch on the host counts."""
    node = links(hardware.gpu("h200"), hardware.fabric("ndr-400"))
    rows = []
    with CURVE.open(newline="") as file:
        for line in csv.DictReader(file):
            size, busbw = int(line["bytes"]), float(line["busbw_gb_s"]) * 1e9
            ours = cost("all_reduce", size, Place(RANKS), node)
            measured = float(line["derived_us"]) * 1e-6
            rows.append(Row(size, measured, busbw, ours.seconds, ours.busbw, f"{ours.algorithm}/{ours.protocol}"))
    return rows


def mean_error(rows: list[Row]) -> float:
    """Geometric mean of the factor between prediction and measurement, minus 1."""
    return math.exp(sum(abs(math.log(row.predicted / row.measured)) for row in rows) / len(rows)) - 1


def worst_error(rows: list[Row]) -> float:
    return max(abs(row.error) for row in rows)
