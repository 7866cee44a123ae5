"""The commands of this room: `serve`, `chat`, `bench startup` and `bench transfer`."""

from pathlib import Path
from typing import Annotated

import typer

from strata.platform.recipe_file import Overrides


def serve(
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="Serve what this run exported. Default: the newest run with an export.")] = None,
    model: Annotated[Path | None, typer.Option(help="Serve this Hugging Face model folder instead of a run.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe for the serve section. Default: the run's own, else laptop.")] = None,
    ask: Annotated[bool, typer.Option("--ask", help="Ask a few prompts once it is up, print the latencies, and stop.")] = False,
) -> None:
    """Serve a model as prefill and decode engines behind the OpenAI API, until Ctrl-C."""
    from strata.serving import terminal

    terminal.serve(overrides or [], run, model, recipe, ask)


def chat(
    url: Annotated[str, typer.Option(help="Where the endpoint is.")] = "http://127.0.0.1:8000",
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0, max=2)] = 0.7,
) -> None:
    """Chat with the endpoint in the terminal. End with Ctrl-D."""
    from strata.serving import terminal

    terminal.chat(url, max_tokens, temperature)


def bench_startup(
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="The run to serve. Default: the newest with an export.")] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face model folder instead of a run.")] = None,
    repeat: Annotated[int, typer.Option(help="Rounds; each starts ours and the peer, in turn.", min=1)] = 3,
    json: Annotated[Path | None, typer.Option(help="The file to write. Default: startup.json among the benchmarks.")] = None,
) -> None:
    """Time from the command to the first answer, beside two bare vLLM servers started side by side."""
    from strata.platform.files import cache_dir
    from strata.serving.bench import startup

    startup.bench(overrides or [], run, model, repeat, json or cache_dir() / "bench" / "startup.json")


def bench_transfer(
    device: Annotated[str | None, typer.Option(help="gpu or cpu: whose memory. Default: the GPU's, if there is one.")] = None,
    mib: Annotated[int, typer.Option(help="How much is read at once.", min=1)] = 256,
    pieces: Annotated[str, typer.Option(help="Into how many pieces it falls, in turn.")] = "64,1024",
    repeat: Annotated[int, typer.Option(help="Times that each is read.", min=1)] = 6,
    json: Annotated[Path | None, typer.Option(help="The file to write. Default: transfer.json among the benchmarks.")] = None,
) -> None:
    """How fast one engine reads another's blocks on this machine: NIXL alone, by the way UCX chooses and by ours."""
    import torch
    from rich.console import Console

    from strata.platform.errors import UserError
    from strata.platform.files import cache_dir
    from strata.serving.bench import transfer

    chosen = device or ("gpu" if torch.cuda.is_available() else "cpu")
    if chosen not in ("gpu", "cpu"):
        raise UserError(f"There is no device '{chosen}'.", "Choose gpu or cpu.")
    counts = [int(word) if word.isdecimal() else 0 for word in pieces.split(",")]
    if not all(0 < count <= mib << 10 for count in counts):
        raise UserError(f"--pieces {pieces} is no list of numbers from 1 to {mib << 10}.", "Write --pieces 64,1024.")
    path = json or cache_dir() / "bench" / "transfer.json"
    transfer.bench("gpu" if chosen == "gpu" else "cpu", mib << 20, counts, repeat, path, Console(highlight=False))
