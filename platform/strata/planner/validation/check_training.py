"""Planned step times against published ones.

Each GPU has one set of constants, since a constant fitted to a row would prove nothing. Where a table does not state the
micro-batch, the fastest micro-batch that fits is planned.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Literal, cast

from strata.planner.catalogue import library
from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import program
from strata.planner.layout import Layout, Recompute, Schedule
from strata.planner.memory.plan import no_fit_note
from strata.planner.plan import plan_training
from strata.planner.step.step import Step
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware

PUBLISHED = Path(__file__).parent / "published"


@dataclass(frozen=True)
class Row:
    """A published figure with the planner's, in seconds per step or in `unit`. `planned` is None for a layout that `strata plan`
    refuses. `note` has the reason, or states that the plan does not fit."""

    table: str
    model: str
    published: float
    planned: float | None
    unit: str = "s"
    note: str = ""

    @property
    def error(self) -> float | None:
        return None if self.planned is None else self.planned / self.published - 1


def mean_error(rows: list[Row]) -> float:
    return mean(abs(row.error) for row in rows if row.error is not None)


def worst_error(rows: list[Row]) -> float:
    return max(abs(row.error) for row in rows if row.error is not None)


def rows() -> list[Row]:
    """Rows with error limits."""
    return [*_megatron_a100(), *_korthikanti(), *_megatron_core()]


def other_runs() -> list[Row]:
    """Runs with too few published settings for a limit, on other GPUs and programs. Missing settings are assumed."""
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
        planned = _plan(
            library.open_model(line["model"]), layout, int(line["sequence"]), line["gpu"], line["fabric"], line["program"]
        )
        unit, measured_as = MEASURES[line["measure"]]
        value = measured_as(planned.step) / layout.gpus if planned.step else None
        found.append(Row("other runs", line["run"], float(line["published"]), value, unit, planned.note))
    return found


MEASURES: dict[str, tuple[str, Callable[[Step], float]]] = {
    "hardware_tflops": ("TFLOP/s per GPU, with recomputation", lambda step: step.hardware_flops / step.seconds / 1e12),
    "model_tflops": ("TFLOP/s per GPU", lambda step: step.model_flops / step.seconds / 1e12),
    "tokens_per_gpu": ("tokens/s per GPU", lambda step: step.tokens_per_s),
}


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
        planned = _plan_gpt(line, layout, "a100-80gb", "hdr-200", "megatron-2021")
        yield Row("Megatron, A100, 2021", line["model"], float(line["derived_step_s"]), planned.seconds, note=planned.note)


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
            planned = _plan_gpt(line, layout, "a100-80gb", "hdr-200", "megatron-2022")
            column = f"{name}_recompute_step_s" if name == "full" else f"{name}_step_s"
            published, model = float(line[column]), f"{line['model']}, {layout.recompute}"
            yield Row("Korthikanti, A100, 2022", model, published, planned.seconds, note=planned.note)


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
        found = [_plan_gpt(line, layout, "h100-sxm", "ndr-400", "megatron-core") for layout in layouts]
        planned = min(found, key=lambda one: (bool(one.note), one.seconds or 0.0))
        yield Row("Megatron-Core, H100, 2024", line["model"], float(line["derived_step_s"]), planned.seconds, note=planned.note)


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


@dataclass(frozen=True)
class Planned:
    """A planned step; None where the layout is refused."""

    step: Step | None
    note: str

    @property
    def seconds(self) -> float | None:
        return self.step.seconds if self.step else None


def _plan_gpt(line: dict[str, str], layout: Layout, gpu: str, fabric: str, name: str) -> Planned:
    shape = _gpt(line)
    return _plan(shape, layout, shape.context, gpu, fabric, name)


def _plan(shape: Shape, layout: Layout, sequence: int, gpu: str, fabric: str, name: str) -> Planned:
    """Plan a row as `strata plan` does, with all its checks."""
    try:
        found = plan_training(shape, layout, sequence, hardware.gpu(gpu), hardware.fabric(fabric), program(name))
    except UserError as error:
        return Planned(None, f"refused: {error.cause}")
    return Planned(found.step, no_fit_note(found.memory))


def _read(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / name).open() as file:
        return list(csv.DictReader(file))
