"""The command `strata plan dit`. Light imports only: the command line loads this module for its help."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.planner import ranges
from strata.planner.cli.options import GPU, FabricName, GpuName, Json, answer, number, open_fabric, open_gpu
from strata.planner.units import share, show
from strata.platform.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strata.planner.diffusion.catalogue import PictureShape, Request
    from strata.planner.diffusion.cost import SamplingPlan
    from strata.planner.diffusion.layout_rules import PictureLayout
    from strata.planner.diffusion.validate import PublishedRow

SIDE = ranges.Range(16, 65_536)
STEPS = ranges.Range(1, 10_000)
FRAMES = ranges.Range(1, 4_001)
PICTURES = ranges.Range(1, 4_096)
WORKERS = ranges.Range(1, 64)
SHOWN = 12  # layouts in the table


def plan_dit(
    model: Annotated[str, typer.Option(help="Diffusion transformer: flux-dev, sd3-medium, sd3.5-large, pixart-alpha, ...")] = (
        "flux-dev"
    ),
    gpu: GpuName = GPU,
    fabric: FabricName = None,
    gpus: Annotated[int, number("Most GPUs for one picture; 1, 2, 4, ... up to it are planned.", WORKERS)] = 16,
    width: Annotated[int | None, number("Pixels. Default: the model's.", SIDE)] = None,
    height: Annotated[int | None, number("Pixels. Default: the width.", SIDE)] = None,
    frames: Annotated[int | None, number("Frames of a video. Default: the model's.", FRAMES)] = None,
    steps: Annotated[int | None, number("Sampling steps. Default: the model's.", STEPS)] = None,
    batch: Annotated[int, number("Pictures that are sampled together.", PICTURES)] = 1,
    guidance: Annotated[bool, typer.Option(help="Classifier-free guidance, where the model has it.")] = True,
    layout: Annotated[
        str | None, typer.Option(help="Plan this layout only, such as ulysses=4,cfg=2. Degrees: ulysses, ring, cfg, pipefusion.")
    ] = None,
    validate: Annotated[bool, typer.Option("--validate", help="Compare with published figures of xDiT instead.")] = False,
    json: Json = None,
) -> None:
    """Predict latency, throughput and memory of a diffusion transformer by layout, and rank the layouts.

    strata plan dit --model flux-dev --gpu h100 --gpus 8
    """
    from strata.planner.diffusion.catalogue import Request, picture_model
    from strata.planner.diffusion.cost import plan_sampling

    if validate:
        _compare(json)
        return
    shape = picture_model(model)
    card = open_gpu(gpu, None)
    net = open_fabric(fabric, card)
    side = width or shape.size
    request = Request(side, height or side, steps or shape.steps, frames or shape.frames, batch, guidance)
    request.check()
    chosen = [_parsed(layout)] if layout else _all(shape, request, gpus)
    plans = [plan_sampling(shape, request, one, card, net) for one in chosen]
    plans.sort(key=lambda plan: (not plan.fits, plan.latency_s))
    data = {"model": shape.name, "gpu": card.name, "fabric": net.name, "request": request, "tokens": request.tokens}
    answer(lambda _: _tables(shape, request, card.name, plans), lambda: {**data, "plans": plans}, json)


def _parsed(text: str) -> "PictureLayout":
    from strata.planner.diffusion.layout_rules import PictureLayout

    degrees: dict[str, int] = {}
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        if name not in PictureLayout.__dataclass_fields__ or not value.isascii() or not value.isdigit() or len(value) > 4:
            known = ", ".join(PictureLayout.__dataclass_fields__)
            raise UserError(f"--layout has the word '{word.strip()[:40]}'.", f"Write it as ulysses=2,ring=2, with {known}.")
        degrees[name] = int(value)
    return PictureLayout(**degrees)


def _all(shape: "PictureShape", request: "Request", most: int) -> "list[PictureLayout]":
    from strata.planner.diffusion.layout_rules import layouts

    counts = [2**power for power in range(most.bit_length()) if 2**power <= most]
    counts += [] if most in counts else [most]
    return [one for count in counts for one in layouts(count, request.splittable(shape))]


def _tables(shape: "PictureShape", request: "Request", gpu: str, plans: "list[SamplingPlan]") -> "list[RenderableType]":
    from strata.planner.cli.tables import grid

    video = f", {request.frames} frames" if request.frames > 1 else ""
    heading = f"{shape.name} on {gpu}, {request.width} x {request.height}{video}, {request.steps} steps, batch {request.batch}"
    note = "latency of the transformer's steps, without text encoders and autoencoder; efficiency: speedup over one GPU / GPUs"
    figures = ["GPUs", "latency", "step", "pictures/s", "efficiency", "exposed", "memory"]
    fastest = grid(f"{heading}: fastest layouts", ["layout"], figures, note)
    by_count = grid("fastest layout for each number of GPUs", ["layout"], figures)
    for table in (fastest, by_count):
        table.add_column("bound by")
    best = {count: next(plan for plan in plans if plan.gpus == count) for count in sorted({plan.gpus for plan in plans})}
    for plan in plans[:SHOWN]:
        fastest.add_row(*_cells(plan))
    for plan in best.values():
        by_count.add_row(*_cells(plan))
    return [fastest] if len(plans) == 1 else [fastest, by_count]


def _cells(plan: "SamplingPlan") -> list[str]:
    return [
        plan.layout.name(),
        f"{plan.gpus}",
        show(plan.latency_s, "s"),
        show(plan.step_s, "s"),
        f"{plan.pictures_per_s:.3g}",
        share(plan.efficiency),
        share(plan.parts.communication / plan.step_s),
        show(plan.memory, "B") + ("" if plan.fits else ", too much"),
        plan.bound,
    ]


def _compare(json: str | None) -> None:
    from strata.planner.diffusion.validate import errors, published_rows

    rows = published_rows()
    data = {
        "rows": [_as_json(row) for row in rows],
        "seconds": errors([row.error for row in rows]),
        "speedup": errors([row.speedup_error for row in rows if row.layout.workers > 1]),
    }
    answer(lambda _: _comparison(rows), lambda: data, json)


def _as_json(row: "PublishedRow") -> dict[str, Any]:
    from strata.planner.cli.output import jsonable

    return {**jsonable(row), "layout": row.layout.name(), "error": row.error, "speedup_error": row.speedup_error}


def _comparison(rows: "list[PublishedRow]") -> "list[RenderableType]":
    from strata.planner.cli.tables import grid
    from strata.planner.diffusion.validate import URL, errors

    note = "published: the whole pipeline; predicted: the transformer's steps alone, with FlashAttention-2"
    figures = ["published", "predicted", "error", "speedup", "predicted", "error"]
    table = grid(f"xDiT ({URL})", ["model", "GPU", "size", "layout"], figures, note)
    for row in rows:
        table.add_row(
            row.model,
            row.gpu,
            f"{row.request.width} x {row.request.height}",
            row.layout.name(),
            show(row.published, "s"),
            show(row.predicted, "s"),
            f"{row.error:+.1%}",
            f"{row.published_speedup:.2f}",
            f"{row.predicted_speedup:.2f}",
            f"{row.speedup_error:+.1%}",
        )
    seconds, speedup = errors([row.error for row in rows]), errors([row.speedup_error for row in rows if row.layout.workers > 1])
    lines = [
        f"{name}: mean {one.mean:.1%}, signed {one.signed:+.1%}, worst {one.worst:+.1%}"
        for name, one in (("seconds", seconds), ("speedup over one GPU", speedup))
    ]
    return [table, "\n".join(lines)]
