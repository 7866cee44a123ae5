"""Published figures of xDiT beside the planner's. See `validation/published/README.md`."""

import csv
from dataclasses import dataclass

from strata.planner.cli.options import open_fabric
from strata.planner.diffusion.catalogue import Request, picture_model
from strata.planner.diffusion.cost import plan_sampling
from strata.planner.diffusion.layout_rules import PictureLayout
from strata.planner.validation.trust import PUBLISHED
from strata.platform.hardware import catalogue as hardware

FIGURES = PUBLISHED / "xdit.csv"
URL = "github.com/xdit-project/xDiT, docs/performance"


@dataclass(frozen=True)
class PublishedRow:
    """`published_speedup` and `predicted_speedup` are over one GPU of the same table."""

    source: str
    model: str
    gpu: str
    request: Request
    layout: PictureLayout
    published: float  # seconds
    predicted: float
    published_speedup: float
    predicted_speedup: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def speedup_error(self) -> float:
        return self.predicted_speedup / self.published_speedup - 1


@dataclass(frozen=True)
class Errors:
    """Mean absolute error, signed mean and the error furthest from 0."""

    mean: float
    signed: float
    worst: float


def published_rows() -> list[PublishedRow]:
    with FIGURES.open(newline="") as file:
        lines = list(csv.DictReader(file))
    found = [(line, _request(line), _layout(line), float(line["seconds"])) for line in lines]
    planned = [_predicted(line, request, layout) for line, request, layout, _ in found]
    alone = {
        _table(line, request): (seconds, prediction)
        for (line, request, layout, seconds), prediction in zip(found, planned, strict=True)
        if layout.workers == 1
    }
    rows = []
    for (line, request, layout, seconds), prediction in zip(found, planned, strict=True):
        base, base_prediction = alone[_table(line, request)]
        speedups = (base / seconds, base_prediction / prediction)
        rows.append(PublishedRow(line["source"], line["model"], line["gpu"], request, layout, seconds, prediction, *speedups))
    return rows


def errors(values: list[float]) -> Errors:
    return Errors(sum(map(abs, values)) / len(values), sum(values) / len(values), max(values, key=abs))


def _request(line: dict[str, str]) -> Request:
    return Request(int(line["width"]), int(line["height"]), int(line["steps"]), int(line["frames"]))


def _layout(line: dict[str, str]) -> PictureLayout:
    return PictureLayout(*(int(line[degree]) for degree in ("ulysses", "ring", "cfg", "pipefusion")))


def _table(line: dict[str, str], request: Request) -> tuple[str, str, Request]:
    return line["source"], line["gpu"], request


def _predicted(line: dict[str, str], request: Request, layout: PictureLayout) -> float:
    """With FlashAttention-2, on which xDiT depends."""
    gpu = hardware.gpu(line["gpu"])
    return plan_sampling(picture_model(line["model"]), request, layout, gpu, open_fabric(None, gpu), "flash-2").latency_s
