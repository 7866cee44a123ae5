"""The command `strata bench offload`. Light imports only: the command line loads this module for its help."""

from pathlib import Path
from typing import Annotated

import typer

from strata.platform.recipe_file import Overrides


def bench_offload(
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="Serve the export of this run. Default: the newest with an export.")] = None,
    model: Annotated[Path | None, typer.Option(help="Serve this Hugging Face model folder.")] = None,
    dummy_model_wanted: Annotated[
        bool, typer.Option("--dummy-model", help="Serve random weights in the shape of the recipe's model.")
    ] = False,
    recipe: Annotated[str | None, typer.Option(help="Recipe for the serve section. Default: the run's own, else laptop.")] = None,
    input: Annotated[
        int | None, typer.Option(help="Tokens of the first turn. Default: 8192, at most five eighths of the context.", min=1)
    ] = None,
    output: Annotated[int, typer.Option(help="Tokens per answer.", min=2)] = 32,
    rounds: Annotated[int, typer.Option(help="Conversations; results are medians.", min=1)] = 5,
    baseline: Annotated[bool, typer.Option(help="Measure an engine without offload, too, after the first.")] = True,
    json: Annotated[Path | None, typer.Option(help="File to write. Default: bench/offload.json in Strata's cache.")] = None,
) -> None:
    """Compare the TTFT of a second turn whose KV blocks are in the KV cache, were evicted to host memory, or are computed
    again. Exits with 1 if the greedy tokens differ."""
    import tempfile

    from rich.console import Console

    from strata.platform import recipe_file
    from strata.platform.errors import UserError
    from strata.platform.files import cache_dir
    from strata.serving.bench.contenders import dummy_model, subject
    from strata.serving.bench.offload import run as runner

    if dummy_model_wanted and (model or run):
        raise UserError("--dummy-model excludes --model and --run.", "Use only one of them.")
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as temporary:
        if dummy_model_wanted:
            model = Path(temporary) / "dummy"
            with console.status("Writing a model of random weights …"):
                dummy_model.write(model, recipe_file.load(recipe or recipe_file.DEFAULT, overrides or []))
        served = subject.choose(overrides or [], run, model, recipe)
        load = runner.Load(input or min(8192, served.context * 5 // 8), output, rounds)
        same = runner.bench(served, load, baseline, json or cache_dir() / "bench" / "offload.json", console)
    if not same:
        raise typer.Exit(1)
