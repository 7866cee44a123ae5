"""`strata plan serve`, `failures`, `schedule` and `collectives`.

Light imports only: the command line loads this module to print its help.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import RenderableType
from rich.text import Text

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
    answer,
    chunks_of,
    number,
    open_fabric,
    open_gpu,
    open_model,
)
from strata.planner.cli.output import jsonable
from strata.planner.errors import choose
from strata.planner.layout import Schedule
from strata.planner.units import size
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware
from strata.platform.hardware.specs import Gpu

if TYPE_CHECKING:
    from strata.planner.collectives.patterns import Place
    from strata.planner.serving.capacity import ServingPlan

Precision = Literal["fp16", "bf16", "fp8"]
Link = Literal["fabric", "nvlink", "pcie"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
RANKS = 8
MEASURED_BYTES = [2**power for power in range(10, 25, 2)]  # 1 KiB to 16 MiB: seconds on a laptop


def plan_serve(
    model: Model = None,
    rate: Annotated[float, number("Requests per second.", ranges.RATE)] = 10.0,
    prompt: Annotated[int, number("Prompt tokens per request.", ranges.SEQUENCE)] = 1000,
    output: Annotated[int, number("Output tokens per request.", ranges.SEQUENCE)] = 300,
    cached: Annotated[float, number("Share of a prompt in the prefix cache.", ranges.CACHED)] = 0.0,
    variation: Annotated[float, number("Standard deviation of prompt lengths over their mean.", ranges.VARIATION)] = 1.0,
    ttft: Annotated[float, number("Objective: p99 of TTFT in seconds.", ranges.TTFT)] = 1.0,
    itl: Annotated[float, number("Objective: mean ITL in seconds.", ranges.ITL)] = 0.05,
    gpu: GpuName = GPU,
    fabric: FabricName = None,
    tensor: Annotated[int, number("GPUs per replica (tensor parallelism).", ranges.LAYOUT["tensor"])] = 1,
    precision: Annotated[Precision, typer.Option(help="Precision of weights and matrix products.")] = "bf16",
    kv_precision: Annotated[Precision, typer.Option(help="Precision of the KV cache.")] = "bf16",
    link: Annotated[Link, typer.Option(help="Link for KV transfers.")] = "fabric",
    max_sequences: Annotated[int, number("Concurrent sequences per engine.", ranges.MAX_SEQUENCES)] = 1024,
    price: Price = None,
    json: Json = None,
    explain: Explain = False,
    plot: Plot = None,
) -> None:
    """Plan replicas and cost for a load within its latency objectives, aggregated and disaggregated."""
    from strata.planner.cli import tables
    from strata.planner.serving.capacity import draw
    from strata.planner.validation import trust

    found = served(
        model,
        rate,
        prompt,
        output,
        cached,
        variation,
        ttft,
        itl,
        gpu,
        fabric,
        tensor,
        precision,
        kv_precision,
        link,
        max_sequences,
        price,
    )
    shape, card, trusted = open_model(model), hardware.gpu(gpu), trust.of_serving()

    def pictures(folder: Path) -> list[Path]:
        draw(found, folder / "latency.png")
        return [folder / "latency.png"]

    def data() -> dict[str, Any]:
        slo = {"ttft_s": ttft, "itl_s": itl}
        return {"model": shape.name, "gpu": card.name, "tensor": tensor, "slo": slo, **jsonable(found), "trust": trusted}

    def parts(_: object) -> list[RenderableType]:
        return [tables.engine(found, card.name, tensor), tables.pools(found), trusted.line]

    answer(parts, data, json, explain, found.worksheet, plot, pictures)


def served(
    model: str | None,
    rate: float,
    prompt: int,
    output: int,
    cached: float,
    variation: float,
    ttft: float,
    itl: float,
    gpu: str,
    fabric: str | None,
    tensor: int,
    precision: Precision,
    kv_precision: Precision,
    link: Link,
    max_sequences: int,
    price: float | None,
) -> "ServingPlan":
    """Plan for the arguments of `plan serve`."""
    from strata.planner.serving.capacity import Slo, plan_serving
    from strata.planner.serving.engine_step import Load

    card = open_gpu(gpu, price)
    return plan_serving(
        open_model(model),
        card,
        open_fabric(fabric, card),
        Load(rate, prompt, output, cached, variation),
        Slo(ttft, itl),
        tensor,
        precision,
        worksheet=Worksheet(f"serving {model}"),
        kv_precision=kv_precision,
        max_sequences=max_sequences,
        link=link,
    )


def plan_failures(
    gpus: Annotated[int, number("GPUs of the run.", ranges.GPUS)],
    model: Model = None,
    state: Annotated[str | None, typer.Option(help="Bytes of a checkpoint, such as 5.6TB, instead of --model.")] = None,
    step: Annotated[float, number("Seconds per step.", ranges.STEP)] = 10.0,
    storage: Annotated[str | None, typer.Option(help="Total storage bandwidth, such as 200GB/s. Default: Llama 3's.")] = None,
    fleet: Annotated[str, typer.Option(help="Fleet with published failure rates ('strata plan list').")] = "llama3",
    spares: Annotated[int | None, number("Spare nodes. Default: as many as needed.", ranges.SPARES)] = None,
    detect: Annotated[float | None, number("Seconds to detect and diagnose a failure.", ranges.DETECT)] = None,
    repair: Annotated[float | None, number("Hours to repair a node.", ranges.REPAIR)] = None,
    preemptions: Annotated[
        float | None, number("Preemptions of a spot node per hour; adds the cost on spot.", ranges.PREEMPTIONS)
    ] = None,
    spot_price: Annotated[float, number("Spot price relative to on demand.", ranges.SPOT_PRICE)] = 0.4,
    gpu: GpuName = GPU,
    price: Price = None,
    json: Json = None,
    explain: Explain = False,
    plot: Plot = None,
) -> None:
    """Plan checkpoints and spares: time between failures, checkpoint interval and goodput."""
    from strata.planner.catalogue.fleets import FLEETS
    from strata.planner.cli import tables
    from strata.planner.plan import state_bytes, usual_storage
    from strata.planner.reliability import failures

    if state is not None and model is not None:
        raise UserError("--state and --model both set the size of a checkpoint.", "Use one of them.")
    if state is None and model is None:
        raise UserError("The size of a checkpoint is unknown.", "Set --model, or --state with its bytes, such as 5.6TB.")
    usual = failures.USUAL
    recovery = replace(
        usual,
        spares=spares,
        detect_s=usual.detect_s if detect is None else detect,
        repair_s=usual.repair_s if repair is None else repair * failures.HOUR,
    )
    worksheet = Worksheet(f"a run of {gpus} GPUs")
    found = failures.plan_failures(
        gpus,
        state_bytes(open_model(model), "bf16") if state is None else size(state, "--state"),
        step,
        usual_storage(gpus) if storage is None else size(storage, "--storage"),
        worksheet=worksheet,
        rates=choose("fleet", fleet, FLEETS),
        recovery=recovery,
        spot=failures.Spot(preemptions, spot_price) if preemptions is not None else None,
        dollars_per_gpu_hour=open_gpu(gpu, price).dollars_per_hour,
    )

    def pictures(folder: Path) -> list[Path]:
        failures.draw(found, folder / "checkpoints.png")
        return [folder / "checkpoints.png"]

    def parts(_: object) -> list[RenderableType]:
        return [tables.failures_line(found), tables.failures(found), tables.failures_money(found)]

    def data() -> dict[str, Any]:
        return {"gpus": gpus, **jsonable(found), "best": found.best.mode}

    answer(parts, data, json, explain, worksheet, plot, pictures)


def plan_schedule(
    schedule: Annotated[Schedule, typer.Option(help="Schedule to show; the others are listed for comparison.")] = "1f1b",
    stages: Annotated[int, number("Pipeline stages.", ranges.STAGES)] = 4,
    micro_batches: Annotated[int, number("Micro-batches per step.", ranges.MICRO_BATCHES)] = 8,
    interleave: Annotated[
        int | None,
        number("Model chunks per stage. Default: 2 where the schedule has several.", ranges.LAYOUT["interleave"]),
    ] = None,
    forward: Annotated[float, number("Seconds of a stage's forward pass.", ranges.SOME_SECONDS)] = 1.0,
    backward: Annotated[float, number("Seconds of a stage's input-gradient pass.", ranges.SOME_SECONDS)] = 1.0,
    weight: Annotated[float, number("Seconds of a stage's weight-gradient pass.", ranges.SECONDS)] = 1.0,
    transfer: Annotated[float, number("Seconds of a transfer between stages.", ranges.SECONDS)] = 0.0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Simulate a pipeline schedule: timeline, bubble and micro-batches in flight, compared with the other schedules."""
    from strata.planner.cli import tables
    from strata.planner.pipeline import schedules, simulate, timeline

    chunks = chunks_of(schedule, interleave)
    if (operations := stages * micro_batches * chunks) > ranges.OPERATIONS:
        raise UserError(
            f"--stages {stages} x --micro-batches {micro_batches} x {chunks} chunks = {operations:,} are too many to simulate.",
            f"Lower one of them: at most {ranges.OPERATIONS:,} operations.",
        )

    def play(one: Schedule, held: int) -> simulate.Simulation:
        times = simulate.even(stages * held, forward / held, backward / held, weight / held, transfer)
        return simulate.simulate(one, stages, micro_batches, held, times)

    chosen = play(schedule, chunks)
    others = []
    for one in get_args(Schedule):
        held = chunks if one == schedule else chunks_of(one, None)
        if schedules.refusal(one, stages, micro_batches, held) is None:
            others.append(chosen if one == schedule else play(one, held))

    def pictures(folder: Path) -> list[Path]:
        title = f"{schedule}, {stages} stages, {micro_batches} micro-batches"
        timeline.draw(chosen, folder / "timeline.png", title)
        return [folder / "timeline.png"]

    def data() -> dict[str, Any]:
        return {
            "schedule": schedule,
            "stages": stages,
            "micro_batches": micro_batches,
            "schedules": {
                one.schedule: {
                    "seconds": one.total,
                    "bubble": one.bubble,
                    "mean_bubble": one.mean_bubble,
                    "in_flight": one.in_flight,
                    "interleave": one.interleave,
                }
                for one in others
            },
            "timeline": [
                [
                    {"kind": o.kind, "micro_batch": o.micro_batch, "chunk": o.chunk, "start": s, "end": e}
                    for o, s, e in chosen.placed(at)
                ]
                for at in range(stages)
            ],
        }

    answer(
        lambda out: [Text(timeline.as_text(chosen, out.width)), tables.schedules(others, schedule)],
        data,
        json,
        plot=plot,
        draw=pictures,
    )


def plan_collectives(
    kind: Annotated[Collective, typer.Option(help="Collective.")] = "all_reduce",
    ranks: Annotated[int | None, number("GPUs in the group; with --measure, processes.", ranges.RANKS)] = None,
    gpu: GpuName = GPU,
    fabric: FabricName = None,
    inside: Annotated[int | None, number("Ranks per NVLink domain. Default: as many as the GPU allows.", ranges.INSIDE)] = None,
    algorithm: Annotated[str | None, typer.Option("--show", help="Algorithm to show step by step, such as ring.")] = None,
    buffer: Annotated[str, typer.Option("--size", help="Buffer size for --explain.")] = "64MiB",
    measure: Annotated[bool, typer.Option("--measure", help="Measure collectives between processes of this machine.")] = False,
    json: Json = None,
    explain: Explain = False,
    plot: Plot = None,
) -> None:
    """Predict the time of collectives by size and algorithm, show an algorithm step by step, or measure this machine."""
    if algorithm is not None:
        _show(algorithm, RANKS if ranks is None else ranks, inside, json)
        return
    from strata.planner.collectives import cost, lab
    from strata.planner.validation import trust

    card = hardware.gpu(gpu)
    links = cost.links(card, open_fabric(fabric, card))
    if measure:
        processes = _own_ranks() if ranks is None else ranks
        ranges.PROCESSES.check("--ranks", processes)
        taken = lab.measure(processes, MEASURED_BYTES, links=links)
        answer(lambda _: [lab.measured_table(taken)], lambda: {"measured": taken}, json)
        return
    place = place_of(ranks, inside, card)
    trusted = trust.of_collectives(place.domains)

    def data() -> dict[str, Any]:
        costs = [
            {
                "bytes": each,
                **jsonable(cost.cost(kind, each, place, links)),
                "algorithms": lab.by_algorithm(kind, each, place, links),
            }
            for each in lab.SIZES
        ]
        crossovers = lab.crossovers(kind, place, links)
        return {"kind": kind, "place": place, "costs": costs, "crossovers": crossovers, "trust": trusted}

    def pictures(folder: Path) -> list[Path]:
        lab.plot(kind, place, links, folder / "collectives.png")
        return [folder / "collectives.png"]

    worksheet = cost.explain(kind, size(buffer, "--size"), place, links)
    answer(lambda _: [lab.costs(kind, place, links), trusted.line], data, json, explain, worksheet, plot, pictures)


def _show(name: str, ranks: int, inside: int | None, json: str | None) -> None:
    from strata.planner.collectives import algorithms, lab

    table = lab.show(name, ranks, inside)  # refuses unknown algorithms

    def data() -> dict[str, Any]:
        found = (
            algorithms.hierarchical(inside, ranks // inside)
            if inside and name == lab.HIERARCHICAL
            else algorithms.BY_NAME[name](ranks)
        )
        return {"algorithm": name, "ranks": ranks, "chunks": found.chunks, "steps": found.steps}

    answer(lambda _: [table], data, json)


def _own_ranks() -> int:
    """One process per GPU, and two without GPUs, since more would compete for cores."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return 2  # `lab.measure` raises the error
    import torch

    return max(2, torch.cuda.device_count())


def place_of(ranks: int | None, inside: int | None, gpu: Gpu) -> "Place":
    """Placement of the ranks. By default a domain has as many ranks as the GPU allows."""
    from strata.planner.collectives.patterns import Place

    ranks = RANKS if ranks is None else ranks
    inside = min(ranks, gpu.domain) if inside is None else inside
    if ranks % inside:
        raise UserError(
            f"--ranks {ranks} cannot be divided into domains of {inside}.",
            "Set --ranks to a multiple of --inside, the ranks per domain.",
        )
    return Place(inside, ranks // inside)
