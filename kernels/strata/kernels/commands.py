"""`strata kernels ...` and `strata bench kernels`. Light imports only: the command line loads this module to print its help."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from strata.platform.errors import UserError

Operations = Annotated[list[str] | None, typer.Argument(help="Operations; all without any.")]


def kernels_stages(
    op: Annotated[str, typer.Argument(help="An operation, such as flash_attention.")],
    arch: Annotated[str, typer.Option(help="sm_80, sm_90 or sm_100.")] = "sm_90",
    kernel: Annotated[str | None, typer.Option(help="One of its kernels; all without it.")] = None,
    config: Annotated[str | None, typer.Option(help="Changes: BLOCK_N=64,num_warps=4.")] = None,
    against: Annotated[str | None, typer.Option(help="Beside it: other changes, or another architecture, or both.")] = None,
    stage: Annotated[str | None, typer.Option(help="Print all of ttir, ttgir, llir, ptx, sass, or of all of them.")] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for every stage, whole, and summary.json.")] = None,
) -> None:
    """Compile an operation's kernels without a GPU and show their way from Triton IR to machine code."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1 makes Triton interpret kernels: there is nothing to compile.", "Unset it.")
    from strata.kernels.compiler.show import Variant, show

    variants = [Variant.parse(arch, config)]
    if against is not None:
        variants.append(variants[0].against(against))
    show(op, kernel, variants, stage, out, Console(highlight=False, soft_wrap=False))


def bench_kernels(
    ops: Operations = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only the shapes with bars; on a CPU, one round.")] = False,
    json: Annotated[Path | None, typer.Option(help="The file to write. Default: kernels.json among the benchmarks.")] = None,
    plot: Annotated[Path | None, typer.Option(help="The roofline, as PNG. Default: beside the JSON.")] = None,
) -> None:
    """Every kernel against torch and its peers: right first, then how fast, and how far from what the device can do. Exits with 1
    when one of ours is wrong."""
    from strata.kernels.bench.run import bench

    outcome = bench(ops or [], quick, json, plot)
    if failed := outcome.failed():
        raise UserError(f"Ours failed: {', '.join(failed)}.", "The table says how; the others' times stand.")


def kernels_tune(
    ops: Operations = None,
    ship: Annotated[bool, typer.Option("--ship", help="Into the table that comes with Strata, not this machine's own.")] = False,
) -> None:
    """Measure which launch configurations are quickest on this GPU, and keep them."""
    from strata.kernels.bench.tuner import tune

    tune(ops or [], ship)


def kernels_list() -> None:
    """What operations there are, where they are, and which launch configurations are known."""
    from strata.kernels.bench.tuner import listing

    Console(highlight=False).print(listing())
