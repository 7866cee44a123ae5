"""Command `strata data make`. Imports nothing heavy: every `strata` command loads this module."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

Made = Literal["chat", "preferences", "completions", "pictures"]


def data_make(
    kind: Annotated[
        Made,
        typer.Argument(help="Conversations, pairs of a chosen and a rejected answer, prompts with completions, or pictures."),
    ],
    to: Annotated[
        Path, typer.Option(help="New folder: its train/ is the data; held-out rows, of other subjects, are beside it.")
    ],
    count: Annotated[int, typer.Option(help="Rows to generate.", min=1)] = 4000,
    seed: Annotated[int, typer.Option(help="Seed of the generator.", min=0)] = 0,
) -> None:
    """Generate a small data set, offline, that a laptop-sized model learns in minutes: short tasks, or pictures with captions."""
    console = Console(highlight=False, soft_wrap=True)
    if kind == "pictures":
        from strata.training.data.pictures import write as pictures

        train = pictures.write(to, count, seed)
        console.print(f"{count:,} pictures with captions in {train}; the first of them in {to / pictures.GRID}")
        return
    from strata.training.data.generated.write import write

    train = write(to, kind, count, seed)
    console.print(f"{count:,} rows of {kind} in {train}, and held-out ones in {to / 'held-out.jsonl'}")
