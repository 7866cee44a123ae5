"""The command `strata bench speculative`. Light imports only: the command line loads this module for its help."""

from pathlib import Path
from typing import Annotated

import typer

from strata.platform.recipe_file import Overrides


def bench_speculative(
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="Serve the export of this run. Default: the newest with an export.")] = None,
    model: Annotated[Path | None, typer.Option(help="Serve this Hugging Face model folder.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft model: a run's name or a model folder. Default: n-grams only, no draft model.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Drafted tokens per step.", min=1, max=16)] = 4,
    text: Annotated[
        Path | None, typer.Option(help="Text whose parts are the prompts. Default: source files of Python's standard library.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Prompts per level.", min=1)] = 16,
    input: Annotated[int, typer.Option(help="Characters per prompt.", min=1)] = 256,
    output: Annotated[int, typer.Option(help="Tokens per answer.", min=2)] = 96,
    concurrency: Annotated[str, typer.Option(help="Concurrent requests of each level.")] = "1,4",
    rounds: Annotated[int, typer.Option(help="Rounds over all levels on each endpoint; results are medians.", min=1)] = 3,
    json: Annotated[Path | None, typer.Option(help="File to write. Default: bench/speculative.json in Strata's cache.")] = None,
) -> None:
    """Compare tokens per second with and without speculative decoding, and the greedy tokens. Exits with 1 if they differ."""
    from rich.console import Console

    from strata.platform.errors import UserError
    from strata.platform.files import cache_dir
    from strata.serving.bench.speculative import run as runner

    levels = tuple(int(word) if word.isdecimal() else 0 for word in concurrency.split(","))
    if not all(levels):
        raise UserError(f"--concurrency {concurrency} is not a list of positive numbers.", "Write --concurrency 1,4.")
    load = runner.Load(prompts, input, output, levels, rounds)
    path = json or cache_dir() / "bench" / "speculative.json"
    chosen = runner.Methods(draft, tokens)
    if not runner.bench(overrides or [], run, model, chosen, load, text, path, Console(highlight=False)):
        raise typer.Exit(1)
