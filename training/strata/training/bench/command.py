"""`strata bench train`, `finetune`, `checkpoint`, `memory-copies` and `memory`. Imports nothing heavy: every command loads
this module."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from strata.platform import recipe_file
from strata.platform.recipe_file import Overrides
from strata.training.bench.contest import Contender, contenders

# typer cannot list literals
Only = Annotated[list[str] | None, typer.Option(help=f"Run only this contender: {', '.join(get_args(Contender))}. Repeatable.")]


def bench_train(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="Recipe name, or path to a recipe file.")] = recipe_file.DEFAULT,
    steps: Annotated[int, typer.Option(help="Training steps per contender and round.", min=2)] = 60,
    warmup: Annotated[int, typer.Option(help="Initial steps to exclude from the measurement.", min=1)] = 20,
    rounds: Annotated[int | None, typer.Option(help="Rounds per contender. Default: 5 on CPUs, 1 on GPUs.", min=1)] = None,
    only: Only = None,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Strata as 'strata train', or its loop without Ray.")] = True,
    kernels: Annotated[bool, typer.Option("--kernels", help="Also run Strata with torch's and with Liger's kernels.")] = False,
    json: Annotated[Path | None, typer.Option(help="Output file. Default: bench/train.json in the cache folder.")] = None,
) -> None:
    """Compare training throughput with a plain torch loop and, on GPUs, with transformers on Liger's kernels."""
    chosen = recipe_file.load(recipe, overrides or ())
    from strata.training.bench import compare

    compare.bench(chosen, compare.Settings(steps, warmup, rounds, contenders(only), ray, kernels), json)


def bench_finetune(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="Recipe name, or path to a recipe file.")] = "h200-sft",
    model: Annotated[
        str, typer.Option(help="A dense Llama's name in 'strata plan list', made with random weights, or a model's folder.")
    ] = "llama-3.2-1b",
    length: Annotated[int, typer.Option(help="Median length of a conversation, in tokens.", min=8)] = 500,
    share: Annotated[float, typer.Option(help="Share of a conversation that the model learns.", min=0.01, max=1.0)] = 0.5,
    steps: Annotated[int, typer.Option(help="Training steps per contender and round.", min=2)] = 12,
    warmup: Annotated[int, typer.Option(help="Initial steps to exclude from the measurement.", min=1)] = 6,
    rounds: Annotated[int | None, typer.Option(help="Rounds per contender. Default: 5 on CPUs, 1 on GPUs.", min=1)] = None,
    only: Only = None,
    json: Annotated[Path | None, typer.Option(help="Output file. Default: bench/finetune.json in the cache folder.")] = None,
) -> None:
    """Compare fine-tuning throughput on packed rows with transformers, peft and, on GPUs, Liger's kernels.

    Rows have random tokens and conversations of log-normal lengths. Strata runs without Ray."""
    from strata.training.bench import compare
    from strata.training.bench.finetuning import contest

    settings = compare.Settings(steps, warmup, rounds, contenders(only), ray=False)
    contest.bench(recipe, list(overrides or ()), model, contest.Conversations(length, share), settings, json)


def bench_checkpoint(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="Recipe name, or path to a recipe file.")] = recipe_file.DEFAULT,
    saves: Annotated[int, typer.Option(help="Checkpoints per mode and round.", min=2)] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds per mode.", min=1)] = 2,
    json: Annotated[Path | None, typer.Option(help="Output file. Default: bench/checkpoint.json in the cache folder.")] = None,
) -> None:
    """Measure how long a checkpoint blocks the training loop, asynchronous and synchronous."""
    chosen = recipe_file.load(recipe, overrides or ())
    from strata.training.bench import stalls

    stalls.bench(chosen, saves, rounds, json)


def bench_memory_copies(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="Recipe name, or path to a recipe file.")] = recipe_file.DEFAULT,
    steps: Annotated[int, typer.Option(help="Training steps per round.", min=6)] = 300,
    warmup: Annotated[int, typer.Option(help="Initial steps to exclude from the measurement.", min=2)] = 20,
    rounds: Annotated[int, typer.Option(help="Rounds.", min=1)] = 3,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Strata as 'strata train', or its loop without Ray.")] = True,
    json: Annotated[Path | None, typer.Option(help="Output file. Default: bench/memory-copies.json in the cache folder.")] = None,
) -> None:
    """Measure what a copy of the state in memory adds to a training step: every second step of a run has one."""
    chosen = recipe_file.load(recipe, overrides or ())
    from strata.training.bench import copies

    copies.bench(chosen, steps, warmup, rounds, ray, json)


def bench_memory(
    json: Annotated[Path | None, typer.Option(help="The file to write. Default: memory.json among the benchmarks.")] = None,
) -> None:
    """Compare measured worker memory on this machine's CPUs with the prediction of 'strata plan', in three layouts.

    Exits with 1 if a prediction is off by more than 10%."""
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
