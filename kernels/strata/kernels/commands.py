"""Commands `strata kernels ...`, `strata compile report`, and the benchmarks of kernels.

Imports nothing heavy: the command line loads this module to print its help.
"""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from strata.platform.errors import UserError

Operations = Annotated[list[str] | None, typer.Argument(help="Operations. Default: all.")]


def kernels_stages(
    op: Annotated[str, typer.Argument(help="Operation, for example flash_attention.")],
    arch: Annotated[str, typer.Option(help="Target architecture: sm_80, sm_90 or sm_100.")] = "sm_90",
    kernel: Annotated[str | None, typer.Option(help="A kernel of the operation. Default: all.")] = None,
    config: Annotated[str | None, typer.Option(help="Settings to override: BLOCK_N=64,num_warps=4.")] = None,
    against: Annotated[str | None, typer.Option(help="Second column: other settings, another architecture, or both.")] = None,
    stage: Annotated[str | None, typer.Option(help="Print one stage in full: ttir, ttgir, llir, ptx, sass, or all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the full text of every stage and summary.json.")] = None,
) -> None:
    """Compile an operation's kernels without a GPU and show each compiler stage, from Triton IR to machine code."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1 makes Triton interpret kernels instead of compiling them.", "Unset it.")
    from strata.kernels.compiler.show import Variant, show

    variants = [Variant.parse(arch, config)]
    if against is not None:
        variants.append(variants[0].against(against))
    show(op, kernel, variants, stage, out, Console(highlight=False, soft_wrap=False))


def bench_kernels(
    ops: Operations = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only shapes with targets; on a CPU, one round.")] = False,
    json: Annotated[Path | None, typer.Option(help="File to write. Default: kernels.json among the benchmark results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Roofline plot, PNG. Default: next to the JSON file.")] = None,
) -> None:
    """Benchmark every kernel against torch and its peers: correctness first, then speed relative to the measured limits of the
    device. Exits with 1 if a Strata kernel is wrong."""
    from strata.kernels.bench.run import bench

    outcome = bench(ops or [], quick, json, plot)
    if failed := outcome.failed():
        raise UserError(f"Strata's kernel failed: {', '.join(failed)}.", "See the table above; the other times are valid.")


def compile_report(
    model: Annotated[str, typer.Argument(help="Folder with a config.json, or hub id; weights are not read.")],
    batch: Annotated[int, typer.Option(help="Sequences in a step.", min=1)] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens per sequence.", min=2)] = 4096,
    picture: Annotated[Path | None, typer.Option(help="SVG file to write. Default: graph.svg in this folder.")] = None,
) -> None:
    """Show what torch.compile(backend="strata") fuses in a Hugging Face model's training step, and what not and why."""
    from strata.kernels.graph.report import report

    report(model, batch, tokens, picture)


def bench_compile(
    model: Annotated[
        str | None, typer.Option(help="llama-3.2-1b, tiny, or a folder or hub id. Default: llama-3.2-1b; tiny without a GPU.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences per step.", min=1)] = 4,
    tokens: Annotated[int | None, typer.Option(help="Tokens per sequence. Default: 4096; 64 without a GPU.", min=2)] = None,
    steps: Annotated[int, typer.Option(help="Steps to measure.", min=1)] = 10,
    warmup: Annotated[int, typer.Option(help="Initial steps to exclude from the measurement.", min=1)] = 5,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run only strata, inductor, liger, inductor-causal, liger-causal or eager. Repeatable."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File to write. Default: compile.json among the benchmark results.")] = None,
) -> None:
    """Compare training throughput of a Hugging Face model compiled by Inductor alone, with Liger-Kernel, and with backend strata.

    Weights and tokens are random. '-causal' contenders use torch's causal attention without a mask. Exits with 1 if
    Strata fails."""
    import torch

    from strata.kernels.bench import training_step

    gpu = torch.cuda.is_available()
    settings = training_step.Settings(
        model or ("llama-3.2-1b" if gpu else "tiny"), batch, tokens or (4096 if gpu else 64), steps, warmup
    )
    results = training_step.bench(settings, tuple(only or training_step.DEFAULT), json)
    if failed := [row for row in results if row.contender == "strata" and row.error]:
        raise UserError(f"Backend strata failed: {failed[0].error}", "The other contenders' results are valid.")


def bench_matmul(
    steps: Annotated[list[str] | None, typer.Argument(help="Steps. Default: all.")] = None,
    json: Annotated[Path | None, typer.Option(help="File to write. Default: matmul.json among the benchmark results.")] = None,
) -> None:
    """Measure one matrix product by every step of docs/kernel-ladder.md, from one thread per element to warp-specialised tensor
    cores, beside cuBLAS. Needs a GPU. Exits with 1 if a step fails; the others are measured."""
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "torch finds no GPU, and the steps are GPU kernels.",
            "Run it on a machine with an NVIDIA GPU. 'strata kernels stages matmul' compiles the steps without one.",
        )
    from strata.kernels.bench.matmul.run import bench

    if failed := bench(steps or [], json, torch.device("cuda", torch.cuda.current_device())):
        raise UserError(f"Steps failed: {', '.join(failed)}.", "See the table above; the other times are valid.")


def kernels_tune(
    ops: Operations = None,
    ship: Annotated[bool, typer.Option("--ship", help="Write the table shipped with Strata instead of this machine's.")] = False,
) -> None:
    """Measure the fastest launch configurations on this GPU and save them."""
    from strata.kernels.bench.tuner import tune

    tune(ops or [], ship)


def kernels_list() -> None:
    """List operations, their source files and the number of tuned launch configurations."""
    from strata.kernels.bench.tuner import listing

    Console(highlight=False).print(listing())
