"""Command `quantize`. Light imports only: `strata --help` loads this module."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from strata.training.quantization import formats

INTERRUPTED = 130  # exit code that a shell reports for Ctrl-C


def quantize(
    source: Annotated[str, typer.Argument(metavar="RUN|DIR", help="A run with an export, or a Hugging Face folder.")],
    format: Annotated[str, typer.Option(help=f"Format of the weights: {', '.join(formats.FORMATS)}.")] = "w4a16-gptq",
    to: Annotated[Path | None, typer.Option(help="A new folder. Default: NAME-FORMAT, in the run or beside the folder.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text, JSONL or Parquet file for calibration and comparison. Default: the run's data.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Rows of calibration, of up to 2048 tokens.", min=1)] = 128,
    group_size: Annotated[
        int | None, typer.Option(help="Input columns that share a scale (4 bits). Default: the largest of 128, 64, 32 that fits.")
    ] = None,
    head: Annotated[
        bool, typer.Option("--head", help="Quantize the output layer, too: faster decoding with a large vocabulary.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the choice of calibration rows.", min=0)] = 0,
    device: Annotated[str | None, typer.Option(help="Device, such as cuda:1. Default: a GPU if there is one.")] = None,
) -> None:
    """Quantize a model into a compressed-tensors folder that 'strata serve --model' takes, and compare it with the original.

    strata quantize laptop-1 --format w4a16-awq
    """
    chosen = formats.named(format)
    formats.require_group_size(group_size)
    from strata.training.quantization.source import resolve

    found = resolve(source)
    from strata.training.quantization import quantize as running

    console = Console(highlight=False, soft_wrap=True)
    try:
        written = running.quantize(found, running.Request(chosen, to, data, samples, group_size, head, seed, device), console)
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written")
        raise typer.Exit(INTERRUPTED) from None
    dtype = " serve.dtype=bfloat16" if chosen.grouped else ""  # recipes for CPUs have float32, which 4-bit kernels do not compute
    console.print(f"written to {written}; serve it with: strata serve --model {written}{dtype}", markup=False)
