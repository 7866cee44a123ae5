"""`strata bench train`, `checkpoint` and `memory`. Light imports only: the command line loads this module for its help."""

from pathlib import Path
from typing import Annotated

import typer

from strata.platform import recipe_file
from strata.platform.recipe_file import Overrides
from strata.training.bench.contest import Contender


def bench_train(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="A recipe's name, or a path to one.")] = recipe_file.DEFAULT,
    steps: Annotated[int, typer.Option(help="Steps of each contender.", min=2)] = 60,
    warmup: Annotated[int, typer.Option(help="First steps that do not count.", min=1)] = 20,
    rounds: Annotated[int | None, typer.Option(help="Turns of each contender. Default: 5 on CPUs, 1 on GPUs.", min=1)] = None,
    only: Annotated[Contender | None, typer.Option(help="This contender alone.")] = None,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Ours as 'strata train', or its loop in plain processes.")] = True,
    kernels: Annotated[bool, typer.Option("--kernels", help="Ours again on torch's kernels and on Liger's.")] = False,
    json: Annotated[Path | None, typer.Option(help="The file to write. Default: train.json among the benchmarks.")] = None,
) -> None:
    """Tokens a second of our training, beside a bare torch loop and (on GPUs) transformers with Liger's kernels."""
    chosen = recipe_file.load(recipe, overrides or ())
    from strata.training.bench import compare

    compare.bench(chosen, compare.Settings(steps, warmup, rounds, only, ray, kernels), json)


def bench_checkpoint(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="A recipe's name, or a path to one.")] = recipe_file.DEFAULT,
    saves: Annotated[int, typer.Option(help="Checkpoints of each mode in a round.", min=2)] = 8,
    rounds: Annotated[int, typer.Option(help="Turns of each mode.", min=1)] = 2,
    json: Annotated[Path | None, typer.Option(help="The file to write. Default: checkpoint.json among the benchmarks.")] = None,
) -> None:
    """How long steps stand still for a checkpoint, asynchronous and synchronous."""
    chosen = recipe_file.load(recipe, overrides or ())
    from strata.training.bench import stalls

    stalls.bench(chosen, saves, rounds, json)


def bench_memory(
    json: Annotated[Path | None, typer.Option(help="The file to write. Default: memory.json among the benchmarks.")] = None,
) -> None:
    """What workers on this machine's CPUs come to hold, beside what 'strata plan' says they will, in three layouts. Past an error
    of a tenth it exits with 1."""
    from json import dumps

    from rich.console import Console
    from rich.table import Table

    from strata.platform.files import cache_dir, write_atomic
    from strata.training.bench import memory

    console = Console(highlight=False)
    with console.status("") as status:
        rows = memory.compare(say=status.update)
    result = Table("layout", "planned", "measured", "error", box=None, header_style="bold")
    for row in rows:
        result.add_row(row.layout, f"{row.planned / 2**20:.0f} MiB", f"{row.measured / 2**20:.0f} MiB", f"{row.error:+.1%}")
    console.print(result)
    path = json or cache_dir() / "bench" / "memory.json"
    write_atomic(path, dumps(memory.as_json(rows), indent=2))
    console.print(f"written to {path}")
    if any(abs(row.error) > memory.BAR for row in rows):
        raise typer.Exit(1)
