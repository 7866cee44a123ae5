"""The command `strata bench dit`. Light imports only: the command line loads this module for its help."""

from pathlib import Path
from typing import Annotated

import typer

LIMIT_S = 190.0


def bench_dit(
    gpu: Annotated[bool, typer.Option("--gpu", help="Full-size models and their attention on one GPU.")] = False,
    rounds: Annotated[int, typer.Option(help="Alternating rounds over all contenders.", min=1)] = 2,
    limit_s: Annotated[float, typer.Option("--limit", help="Seconds for all of --gpu; what is not reached is noted.")] = LIMIT_S,
    json: Annotated[Path | None, typer.Option("--json", help="Write the results as JSON to this file.")] = None,
    captions: Annotated[
        Path | None,
        typer.Option(help="Quality instead of speed: PSNR of the step cache and PipeFusion for captions of this metadata.jsonl."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Picture run of --captions. Default: the newest with an export.")] = None,
    to: Annotated[Path, typer.Option(help="Folder for the pictures of --captions, for 'strata eval pictures'.")] = Path("drawn"),
) -> None:
    """Measure pictures per second of diffusion transformers beside diffusers: by layout over CPU workers, or on one GPU."""
    from strata.serving.diffusion.bench import run as bench

    if captions:
        bench.by_quality(run, captions, to, json)
    elif gpu:
        bench.on_one_gpu(rounds, limit_s, json)
    else:
        bench.by_layout(rounds, json)
