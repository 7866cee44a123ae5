"""The command `strata bench routing`. Light imports only: the command line loads this module for its help."""

from pathlib import Path
from typing import Annotated

import typer

from strata.platform.recipe_file import Overrides


def bench_routing(
    overrides: Overrides = None,
    replicas: Annotated[int, typer.Option(help="Decode replicas.", min=2)] = 4,
    conversations: Annotated[int, typer.Option(help="Conversations.", min=1)] = 16,
    turns: Annotated[int, typer.Option(help="Turns of a conversation.", min=1)] = 8,
    systems: Annotated[int, typer.Option(help="Different system prompts.", min=1)] = 8,
    system: Annotated[int, typer.Option(help="Tokens of a system prompt.", min=1)] = 1024,
    user: Annotated[int, typer.Option(help="Tokens of a user's message.", min=1)] = 160,
    output: Annotated[int, typer.Option(help="Tokens of an answer.", min=2)] = 32,
    concurrency: Annotated[int, typer.Option(help="Conversations at a time.", min=1)] = 4,
    think: Annotated[float, typer.Option(help="Mean seconds between turns.", min=0)] = 1.0,
    rounds: Annotated[int, typer.Option(help="Rounds, each with new endpoints and texts, in alternating order.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the texts.", min=0)] = 0,
    json: Annotated[Path | None, typer.Option(help="File to write. Default: bench/routing.json in Strata's cache.")] = None,
) -> None:
    """Compare serve.routing=kv and least-busy on multi-turn conversations: prefix hits, TTFT, and the time of a choice."""
    from rich.console import Console

    from strata.platform.files import cache_dir
    from strata.serving.bench.routing import run
    from strata.serving.bench.routing.conversations import Load

    load = Load(conversations, turns, systems, system, user, output, concurrency, think, vocab=512, seed=seed)
    run.bench(load, replicas, rounds, overrides or [], Console(highlight=False), json or cache_dir() / "bench" / "routing.json")
