"""`strata plan` and `plan list`. The other modules of this folder have the other plan commands.

Light imports only: the command line loads this module to print its help.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from strata.planner import ranges
from strata.planner.cli.options import (
    GPU,
    Explain,
    FabricName,
    GpuName,
    Json,
    Model,
    Plot,
    Price,
    Program,
    Seq,
    answer,
    chunks_of,
    number,
    open_fabric,
    open_gpu,
    open_model,
    usual_sequence,
)
from strata.planner.cli.output import jsonable
from strata.planner.layout import Layout, Offload, Recompute, Schedule
from strata.planner.units import count, size
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware

if TYPE_CHECKING:
    from strata.planner.catalogue.shape import Shape
    from strata.planner.memory.tuning import Tuning
    from strata.planner.plan import TrainingPlan

Precision = Literal["fp32", "fp16", "bf16", "fp8"]
Tokens = Annotated[str | None, typer.Option(help="Token budget, such as 15T or 300B, for days and dollars.")]
Storage = Annotated[str | None, typer.Option(help="Checkpoint storage bandwidth, such as 200GB/s. Default: Llama 3's.")]
LAYOUT = "Layout"  # a panel of the help
ROUNDS = 4  # default micro-batches per stage, enough to fill a pipeline


def _layout(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=LAYOUT)


def _count(name: str, text: str) -> Any:
    return number(text, ranges.LAYOUT[name.replace("-", "_")], f"--{name}", panel=LAYOUT)


def plan(
    ctx: typer.Context,
    recipe: Annotated[str | None, typer.Option(help="Name or path of a recipe; section.key=value arguments change it.")] = None,
    model: Model = None,
    gpu: GpuName = GPU,
    fabric: FabricName = None,
    program: Program = None,
    gpus: Annotated[
        int | None,
        number("All GPUs; --data is derived from the other dimensions.", ranges.GPUS, "--gpus", panel=LAYOUT),
    ] = None,
    data: Annotated[int | None, _count("data", "Data-parallel size.")] = None,
    tensor: Annotated[int | None, _count("tensor", "Tensor-parallel size.")] = None,
    pipeline: Annotated[int | None, _count("pipeline", "Pipeline stages.")] = None,
    schedule: Annotated[Schedule | None, _layout("Pipeline schedule.")] = None,
    interleave: Annotated[int | None, _count("interleave", "Model chunks per pipeline stage.")] = None,
    expert: Annotated[int | None, _count("expert", "Expert-parallel size.")] = None,
    sequence: Annotated[int | None, _count("sequence", "GPUs that split each sequence by heads (Ulysses).")] = None,
    context: Annotated[int | None, _count("context", "GPUs that split each sequence in a ring.")] = None,
    zero: Annotated[int | None, _count("zero", "ZeRO stage; shards 1 optimizer, 2 gradients, 3 parameters.")] = None,
    micro_batch: Annotated[int | None, _count("micro-batch", "Sequences per micro-batch.")] = None,
    batch: Annotated[int | None, _count("batch", f"Sequences per step. Default: {ROUNDS} micro-batches per stage.")] = None,
    recompute: Annotated[Recompute | None, _layout("Activation recomputation.")] = None,
    offload: Annotated[Offload | None, _layout("State in host memory.")] = None,
    precision: Annotated[Precision | None, _layout("Precision of the matrix products.")] = None,
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel", help="Shard the operations between tensor-parallel matrices by tokens.", rich_help_panel=LAYOUT
        ),
    ] = False,
    seq: Seq = None,
    tokens: Tokens = None,
    price: Price = None,
    storage: Storage = None,
    json: Json = None,
    explain: Explain = False,
    plot: Plot = None,
) -> None:
    """Plan a training layout: memory, step time, bottleneck and cost. Needs no GPU.

    strata plan --model llama-3-70b --gpu h100 --data 8 --tensor 8 --pipeline 8 --tokens 15T
    """
    if ctx.invoked_subcommand:
        return
    given = {
        "data": data,
        "tensor": tensor,
        "pipeline": pipeline,
        "schedule": schedule,
        "interleave": interleave,
        "expert": expert,
        "sequence": sequence,
        "context": context,
        "zero": zero,
        "micro_batch": micro_batch,
        "batch": batch,
        "recompute": recompute,
        "offload": offload,
        "precision": precision,
        "sequence_parallel": sequence_parallel,
    }
    found = planned(given, ctx.args, recipe, model, gpu, fabric, program, gpus, seq, tokens, price, storage)
    from strata.planner.cli import plots, report
    from strata.planner.validation.trust import of_training

    trust = of_training(found.shape, found.layout, found.sequence, found.gpu, found.software)
    answer(
        lambda _: report.report(found, trust),
        lambda: training_json(found) | {"trust": trust},
        json,
        explain,
        found.worksheet,
        plot,
        lambda folder: plots.draw(found, folder),
    )


def planned(
    given: dict[str, Any],
    words: list[str],
    recipe: str | None,
    model: str | None,
    gpu: str,
    fabric: str | None,
    program: str | None,
    gpus: int | None,
    seq: int | None,
    tokens: str | None,
    price: float | None,
    storage: str | None,
) -> "TrainingPlan":
    """Plan for a command line. `given` has the layout options; an absent option is None."""
    shape, layout, length, usual, tuning = _start(recipe, model, words)
    card = open_gpu(gpu, price)
    if given["precision"] is None and layout is None and "bf16" not in card.flops:
        given = given | {"precision": "fp16"}
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    layout = _lay_out(layout, chosen, gpus)

    from strata.planner.catalogue.software import program as open_program
    from strata.planner.plan import plan_training

    return plan_training(
        shape,
        layout,
        length if seq is None else seq,
        card,
        open_fabric(fabric, card),
        open_program(usual if program is None else program),
        tokens=None if tokens is None else count(tokens, "--tokens"),
        storage=None if storage is None else size(storage, "--storage"),
        tuning=tuning,
    )


def _start(recipe: str | None, model: str | None, words: list[str]) -> tuple["Shape", Layout | None, int, str, "Tuning | None"]:
    """Model, layout of the recipe (None without one), tokens per sequence, default training program, and what the recipe trains
    if it is not all."""
    if recipe is not None and model is not None:
        raise UserError("--recipe and --model both name a model.", "Use one of them.")
    if recipe is None:
        if words:
            known = "search, serve, failures, schedule, collectives, cluster, queue, dit, validate, list"
            raise UserError(
                f"'{words[0]}' is not a plan command, and section.key=value arguments need --recipe.",
                f"The commands are {known}.",
            )
        shape = open_model(model)
        return shape, None, usual_sequence(shape), "megatron-core", None
    from strata.planner.memory.tuning import tuning_of
    from strata.planner.recipes import from_recipe, program_of
    from strata.platform import recipe_file

    read = recipe_file.load(recipe, words)
    shape, layout, length = from_recipe(read)
    tuning = tuning_of(read.model, read.train)
    return replace(shape, name=Path(recipe).stem), layout, length, program_of(read.train), tuning


def _lay_out(layout: Layout | None, given: dict[str, Any], gpus: int | None) -> Layout:
    from strata.planner.checks import data_of

    if "schedule" not in given and given.get("interleave", 1) > 1:
        given["schedule"] = "interleaved"
    if "schedule" in given:
        given["interleave"] = chunks_of(given["schedule"], given.get("interleave"))
    changed = replace(layout or Layout(), **given)
    if gpus is not None:
        data = data_of(gpus, changed)
        if given.get("data", data) != data:
            raise UserError(
                f"--data {given['data']} and --gpus {gpus} contradict each other: the other dimensions leave --data {data}.",
                "Use one of them.",
            )
        changed = replace(changed, data=data)
    if "batch" in given or layout is not None:
        return changed
    rounds = ROUNDS * changed.pipeline if changed.pipeline > 1 else 1
    return replace(changed, batch=changed.data * changed.micro_batch * rounds)


def training_json(found: "TrainingPlan") -> dict[str, Any]:
    return {
        "model": {**jsonable(found.shape), "parameters": found.shape.parameters(), "active": found.shape.active_parameters()},
        "gpu": found.gpu,
        "fabric": found.fabric,
        "program": found.software.name,
        "layout": found.layout,
        "sequence": found.sequence,
        "gpus": found.layout.gpus,
        "fits": found.memory.fits,
        "capacity_bytes": found.memory.capacity,
        "peak_bytes": found.memory.peak,
        "memory": [{**jsonable(stage), "total": stage.total} for stage in found.memory.stages],
        "step": {**jsonable(found.step), "limit": found.step.limit},
        "failures": {**jsonable(found.failures), "best": found.failures.best.mode},
        "budget": found.budget,
    }


def plan_list(
    what: Annotated[
        Literal["all", "models", "gpus", "fabrics", "programs", "fleets"], typer.Argument(help="Part of the catalogue.")
    ] = "all",
    json: Json = None,
) -> None:
    """List the catalogue: models, GPUs, networks, training programs, and fleets with published failure rates."""
    from strata.planner.catalogue import library
    from strata.planner.catalogue.fleets import FLEETS
    from strata.planner.catalogue.software import PROGRAMS
    from strata.planner.cli import tables

    shelves: dict[str, tuple[Callable[[], Table], Callable[[], list[Any]]]] = {
        "models": (tables.models, lambda: [library.model(name) for name in library.model_names()]),
        "gpus": (tables.gpus, lambda: [hardware.gpu(name) for name in hardware.gpu_names()]),
        "fabrics": (tables.fabrics, lambda: [hardware.fabric(name) for name in hardware.fabric_names()]),
        "programs": (tables.programs, lambda: list(PROGRAMS.values())),
        "fleets": (tables.fleets, lambda: list(FLEETS.values())),
    }
    chosen = [shelf for shelf in shelves if what in ("all", shelf)]
    answer(lambda _: [shelves[shelf][0]() for shelf in chosen], lambda: {shelf: shelves[shelf][1]() for shelf in chosen}, json)
