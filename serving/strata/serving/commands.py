"""Commands `serve`, `chat`, `bench startup` and `bench transfer`. Light imports only: `strata --help` loads this module."""

from pathlib import Path
from typing import Annotated

import typer

from strata.platform.recipe_file import Overrides


def serve(
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="Serve this run's export. Default: the newest run with an export.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Serve this instead of a run: a model folder, an id on Hugging Face, or a bucket's URI.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe for the serve section. Default: the run's own, else laptop.")] = None,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help="Send a few prompts once it is up, print the latencies, and stop. A picture model takes your own: "
            "--ask 'a red circle'.",
        ),
    ] = False,
) -> None:
    """Serve a model behind the OpenAI API until Ctrl-C: text from prefill and decode engines, or pictures."""
    from strata.serving import terminal

    terminal.serve(overrides or [], run, model, recipe, ask)


def chat(
    url: Annotated[str, typer.Option(help="Address of the endpoint.")] = "http://127.0.0.1:8000",
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0, max=2)] = 0.7,
    model: Annotated[str | None, typer.Option(help="Name of a model, an alias or an adapter. Default: the main model.")] = None,
) -> None:
    """Chat with the endpoint in the terminal. End with Ctrl-D."""
    from strata.serving import terminal

    terminal.chat(url, max_tokens, temperature, model)


def bench_startup(
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="The run to serve. Default: the newest with an export.")] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face model folder instead of a run.")] = None,
    dummy_model_wanted: Annotated[
        bool, typer.Option("--dummy-model", help="Serve random weights in the shape of the recipe's model.")
    ] = False,
    recipe: Annotated[str | None, typer.Option(help="Recipe for the serve section. Default: the run's own, else laptop.")] = None,
    repeat: Annotated[int, typer.Option(help="Rounds; each starts Strata, then its peer.", min=1)] = 3,
    json: Annotated[Path | None, typer.Option(help="The file to write. Default: startup.json among the benchmarks.")] = None,
) -> None:
    """Time from the command to the first answer and the phases of each engine's start, beside bare vLLM: on CPUs two servers
    started side by side, on GPUs one server with a whole GPU."""
    import tempfile

    from strata.platform import recipe_file
    from strata.platform.errors import UserError
    from strata.platform.files import cache_dir
    from strata.serving.bench import startup
    from strata.serving.bench.contenders import dummy_model

    if dummy_model_wanted and (model or run):
        raise UserError("--dummy-model excludes --model and --run.", "Use only one of them.")
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as temporary:
        if dummy_model_wanted:
            model = Path(temporary) / "dummy"
            dummy_model.write(model, recipe_file.load(recipe or recipe_file.DEFAULT, overrides or []))
        startup.bench(overrides or [], run, model, recipe, repeat, json or cache_dir() / "bench" / "startup.json")


def bench_transfer(
    device: Annotated[str | None, typer.Option(help="Memory to transfer: gpu or cpu. Default: gpu, if there is one.")] = None,
    mib: Annotated[int, typer.Option(help="MiB per transfer.", min=1)] = 256,
    fragments: Annotated[str, typer.Option(help="Numbers of blocks to divide a transfer into, one after another.")] = "64,1024",
    repeat: Annotated[int, typer.Option(help="Transfers for each number.", min=1)] = 6,
    json: Annotated[Path | None, typer.Option(help="File to write. Default: bench/transfer.json in Strata's cache.")] = None,
) -> None:
    """Speed of reading another engine's KV blocks on this machine: NIXL alone, with UCX's own transport and with Strata's."""
    import torch
    from rich.console import Console

    from strata.platform.errors import UserError
    from strata.platform.files import cache_dir
    from strata.serving.bench import transfer

    chosen = device or ("gpu" if torch.cuda.is_available() else "cpu")
    if chosen not in ("gpu", "cpu"):
        raise UserError(f"There is no device '{chosen}'.", "Use --device gpu or cpu.")
    counts = [int(word) if word.isdecimal() else 0 for word in fragments.split(",")]
    if not all(0 < count <= mib << 10 for count in counts):
        raise UserError(f"--fragments {fragments} is no list of numbers from 1 to {mib << 10}.", "Write --fragments 64,1024.")
    path = json or cache_dir() / "bench" / "transfer.json"
    transfer.bench("gpu" if chosen == "gpu" else "cpu", mib << 20, counts, repeat, path, Console(highlight=False))
