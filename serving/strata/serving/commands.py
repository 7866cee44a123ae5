"""The commands of this room: `serve`, `chat` and `bench startup`."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Changes to the recipe.")]


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
) -> None:
    """Time from the command to the first answer, beside two bare vLLM servers started side by side."""
    from strata.serving import startup

    startup.bench(overrides or [], run, model, repeat)
