"""`strata data preview`. Imports nothing heavy: every `strata` command loads this module."""

from pathlib import Path
from typing import Annotated

import typer

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe_file import Overrides


def data_preview(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="A recipe's name, or a path to one.")] = recipe_file.DEFAULT,
    row: Annotated[int, typer.Option(help="Row of the training split to show, from 0.", min=0)] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of the tokenizer. Default: that of model.from.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Brackets around counted tokens instead of colours.")] = False,
) -> None:
    """Show a row of fine-tuning data as the model sees it: its documents, and the tokens that count in the loss."""
    chosen = recipe_file.load(recipe, overrides or ())
    if tokenizer is None and chosen.model.source is None:
        fix = "Pass the folder of a Hugging Face tokenizer with --tokenizer."
        raise UserError("The recipe has no model.from, so there is no tokenizer.", fix)
    from strata.platform.model_families import source
    from strata.training.data.preview import preview

    preview(chosen.data, tokenizer or source.snapshot(chosen.model.source or ""), chosen.model.context, row, plain)
