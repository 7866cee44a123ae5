"""Command `eval pictures`. Light imports only: `strata --help` loads this module."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def eval_pictures(
    folder: Annotated[Path, typer.Argument(help="Pictures with generated captions in metadata.jsonl, or folders of such.")],
) -> None:
    """Judge pictures by their captions, those of the generated pictures: background, colour, shape, number, size and place.

    strata eval pictures drawn
    """
    from rich.table import Column, Table

    from strata.training.diffusion import judged_folder
    from strata.training.diffusion.judge import FEATURES

    table = Table(Column(no_wrap=True), "pictures", "right", *FEATURES, box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name, count, found in judged_folder.every(folder):
        table.add_row(name, str(count), *(f"{share:.0%}" for share in found.values()))
    Console(highlight=False, soft_wrap=True).print(table)
