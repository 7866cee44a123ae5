"""Options common to several plan commands, and the output of their results."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from strata.planner import ranges
from strata.planner.catalogue import library
from strata.planner.catalogue.shape import Shape
from strata.planner.cli.output import console, jsonable, plot_folder, write_json
from strata.planner.layout import Schedule
from strata.planner.pipeline.schedules import CHUNKS
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware
from strata.platform.hardware.specs import Fabric, Gpu

GPU = "h100"
# Default network of each GPU, from the vendors' reference systems (DGX-1, DGX A100, DGX H100, GB200 NVL72).
FABRICS = {"v100": "edr-100", "a100": "hdr-200", "gb200": "ndr-400-nvl72", "ascend": "roce-200"}
OTHER_FABRIC = "ndr-400"
USUAL_SEQUENCE = 8192  # pretraining length of Llama 3 and others, before context extension


def number(text: str, within: ranges.Range, *names: str, panel: str | None = None) -> Any:
    """A numeric command-line option with a range, which its help states."""

    def check(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
        if value is not None and not ctx.resilient_parsing:
            within.check(param.opts[0], value)
        return value

    return typer.Option(*names, help=f"{text}  ({within})", callback=check, rich_help_panel=panel)


Model = Annotated[
    str | None, typer.Option(help="Model of the catalogue ('strata plan list'), or a Hugging Face config.json or its folder.")
]
GpuName = Annotated[str, typer.Option("--gpu", help="GPU of the catalogue.")]
FabricName = Annotated[
    str | None, typer.Option("--fabric", help="Network of the catalogue. Default: the GPU's reference system.")
]
Program = Annotated[str | None, typer.Option(help="Training program: strata, megatron-core, ... ('strata plan list').")]
Seq = Annotated[
    int | None,
    number(f"Tokens per sequence. Default: the model's context, at most {USUAL_SEQUENCE}.", ranges.SEQUENCE, "--seq"),
]
Price = Annotated[float | None, number("Dollars per GPU-hour. Default: the catalogue's.", ranges.PRICE, "--price")]
Json = Annotated[str | None, typer.Option("--json", help="Write the result as JSON to this file, or to standard output for '-'.")]
Explain = Annotated[bool, typer.Option("--explain", help="Print the formula of every figure, with values substituted.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write plots into this folder.")]


def open_gpu(name: str, price: float | None) -> Gpu:
    gpu = hardware.gpu(name)
    return gpu if price is None else replace(gpu, dollars_per_hour=price)


def open_fabric(name: str | None, gpu: Gpu) -> Fabric:
    usual = next((fabric for start, fabric in FABRICS.items() if gpu.name.startswith(start)), OTHER_FABRIC)
    return hardware.fabric(usual if name is None else name)


def open_model(name: str | None) -> Shape:
    if name is None:
        raise UserError("--model is missing.", "Set --model to a name from 'strata plan list', a config.json or its folder.")
    return library.open_model(name)


def usual_sequence(shape: Shape) -> int:
    return min(shape.context, USUAL_SEQUENCE)


def chunks_of(schedule: Schedule, interleave: int | None) -> int:
    """Model chunks per pipeline stage: the user's value, or the schedule's default."""
    return CHUNKS.get(schedule, 2) if interleave is None else interleave


def answer(
    parts: Callable[[Console], list[RenderableType]],
    data: Callable[[], dict[str, Any]],
    json: str | None,
    explain: bool = False,
    worksheet: Worksheet | None = None,
    plot: Path | None = None,
    draw: Callable[[Path], list[Path]] | None = None,
    written: Sequence[Path] = (),
) -> None:
    """Write a result: tables, the worksheet and the paths of written files. JSON on standard output is printed alone."""
    from strata.planner.cli import explain as explanation

    result = jsonable(data())  # also without --json: it refuses results that are not finite
    if json is not None:
        write_json(result | ({"explain": jsonable(explanation.as_json(worksheet))} if explain and worksheet else {}), json)
    pictures = draw(plot_folder(plot)) if plot and draw else []
    if json == "-":
        return
    out = console()
    for part in parts(out):
        out.print(part, soft_wrap=isinstance(part, str))
        out.print()
    if explain and worksheet:
        out.print(explanation.as_text(worksheet), soft_wrap=True)
    for path in (*written, *([Path(json)] if json else []), *pictures):
        out.print(f"written: {path}", soft_wrap=True)
