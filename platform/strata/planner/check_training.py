"""The planner's step times beside published ones. One set of constants a GPU: a constant fitted to a row would prove nothing.

Two tables do not say what micro-batch they ran with; there the plan takes its own quickest that fits.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Literal, cast

from strata.planner import library
from strata.planner.layout import Layout, Recompute, Schedule
from strata.planner.shape import Shape
from strata.planner.sheet import Sheet
from strata.planner.software import program
from strata.planner.step import Step, plan_step

PUBLISHED = Path(__file__).parent / "published"
MEAN_BAR = 0.06
WORST_BAR = 0.15


@dataclass(frozen=True)
class Row:
    """Seconds of a step, or what `unit` says."""

    table: str
    model: str
    published: float
    planned: float
    unit: str = "s"

    @property
    def error(self) -> float:
        return self.planned / self.published - 1


def mean_error(rows: list[Row]) -> float:
    return mean(abs(row.error) for row in rows)


def worst_error(rows: list[Row]) -> float:
    return max(abs(row.error) for row in rows)


def rows() -> list[Row]:
    """Those that the bars are for."""
    return [*_megatron_a100(), *_korthikanti(), *_megatron_core()]


def other_runs() -> list[Row]:
    """Runs by others, on other GPUs and programs, of which too little is published to hold a bar to: settings that are not said
    are assumed."""
    found = []
    for line in _read("other_runs.csv"):
        layout = Layout(
            data=int(line["data"]),
            tensor=int(line["tensor"]),
            pipeline=int(line["pipeline"]),
            expert=int(line["expert"]),
            schedule=cast(Schedule, line["schedule"]),
            interleave=int(line["interleave"]),
            zero=int(line["zero"]),
            micro_batch=int(line["micro_batch"]),
            batch=int(line["batch"]),
            recompute=cast(Recompute, line["recompute"]),
            sequence_parallel=line["sequence_parallel"] == "yes",
            precision=cast(Literal["fp16", "bf16", "fp8"], line["precision"]),
        )
        step = plan_step(
            library.open_model(line["model"]),
            layout,
            library.gpu(line["gpu"]),
            library.fabric(line["fabric"]),
            program(line["program"]),
            Sheet(line["run"]),
            int(line["sequence"]),
        )
        planned, unit = _measured_as(line["measure"], step, layout.gpus)
        found.append(Row("other runs", line["run"], float(line["published"]), planned, unit))
    return found


def _measured_as(measure: str, step: Step, gpus: int) -> tuple[float, str]:
    match measure:
        case "hardware_tflops":
            return step.hardware_flops / step.seconds / gpus / 1e12, "TFLOP/s a GPU, recompute counted"
        case "model_tflops":
            return step.model_flops / step.seconds / gpus / 1e12, "TFLOP/s a GPU"
        case _:
            return step.tokens_per_s / gpus, "tokens/s a GPU"


def _megatron_a100() -> Iterator[Row]:
    for line in _read("megatron_a100_2021.csv"):
        stages, layers = int(line["pp"]), int(line["layers"])
        chunks = layers // stages // int(line["layers_per_virtual_stage"] or layers // stages)
        layout = Layout(
            data=int(line["gpus"]) // int(line["tp"]) // stages,
            tensor=int(line["tp"]),
            pipeline=stages,
            schedule="interleaved" if chunks > 1 else "1f1b",
            interleave=chunks,
            zero=0,
            micro_batch=int(line["micro_batch"]),
            batch=int(line["global_batch"]),
            recompute="full",
            precision="fp16",
        )
        step = _planned(_gpt(line), layout, "a100-80gb", "hdr-200", "megatron-2021")
        yield Row("Megatron, A100, 2021", line["model"], float(line["derived_step_s"]), step)


def _korthikanti() -> Iterator[Row]:
    for line in _read("korthikanti_a100_2022.csv"):
        chunks = int(line["interleave"])
        full = Layout(
            tensor=int(line["tp"]),
            pipeline=int(line["pp"]),
            schedule="interleaved" if chunks > 1 else "1f1b",
            interleave=chunks,
            zero=0,
            micro_batch=int(line["micro_batch"]),
            batch=int(line["global_batch"]),
            recompute="full",
            precision="fp16",
        )
        selective = replace(full, recompute="selective", sequence_parallel=True)
        for name, layout in ("full", full), ("seqpar_selective", selective):
            step = _planned(_gpt(line), layout, "a100-80gb", "hdr-200", "megatron-2022")
            column = f"{name}_recompute_step_s" if name == "full" else f"{name}_step_s"
            yield Row("Korthikanti, A100, 2022", f"{line['model']}, {layout.recompute}", float(line[column]), step)


def _megatron_core() -> Iterator[Row]:
    for line in _read("megatron_core_h100_2024.csv"):
        data, batch = int(line["dp"]), int(line["global_batch"])
        layouts = [
            Layout(
                data=data,
                tensor=int(line["tp"]),
                pipeline=int(line["pp"]),
                zero=1,
                micro_batch=micro_batch,
                batch=batch,
                sequence_parallel=int(line["tp"]) > 1,
            )
            for micro_batch in (1, 2, 4)
            if batch % (data * micro_batch) == 0
        ]
        step = min(_planned(_gpt(line), layout, "h100-sxm", "ndr-400", "megatron-core") for layout in layouts)
        yield Row("Megatron-Core, H100, 2024", line["model"], float(line["derived_step_s"]), step)


def _gpt(line: dict[str, str]) -> Shape:
    hidden, heads = int(line["hidden"]), int(line["heads"])
    return Shape(
        name=line["model"],
        layers=int(line["layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=int(line["vocab"]),
        context=int(line["seq"]),
        gated=False,
        tied=True,
        biases=True,
        positions=True,
    )


def _planned(shape: Shape, layout: Layout, gpu: str, fabric: str, name: str) -> float:
    return plan_step(shape, layout, library.gpu(gpu), library.fabric(fabric), program(name), Sheet(shape.name)).seconds


def _read(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / name).open() as file:
        return list(csv.DictReader(file))
