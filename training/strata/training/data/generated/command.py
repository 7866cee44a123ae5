"""Command `strata data make`. Imports nothing heavy: every `strata` command loads this module."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from strata.training.data.generated.rows import Kind


def data_make(
    kind: Annotated[
        Kind, typer.Argument(help="Conversations, pairs of a chosen and a rejected answer, or prompts with completions.")
    ],
    to: Annotated[Path, typer.Option(help="New folder: its train/ is the data, held-out.jsonl has prompts on other subjects.")],
    count: Annotated[int, typer.Option(help="Rows to generate.", min=1)] = 4000,
    seed: Annotated[int, typer.Option(help="Seed of the generator.", min=0)] = 0,
) -> None:
    """Generate a small data set for fine-tuning, offline: short tasks that a laptop-sized model learns in minutes."""
    from strata.training.data.generated.write import write

    console = Console(highlight=False, soft_wrap=True)
    train = write(to, kind, count, seed)
    console.print(f"{count:,} rows of {kind} in {train}, and held-out ones in {to / 'held-out.jsonl'}")
