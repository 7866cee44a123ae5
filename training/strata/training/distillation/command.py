"""Command `eval draft`. Light imports only: `strata --help` loads this module."""

from typing import Annotated

import typer
from rich.console import Console

from strata.platform import runs
from strata.platform.errors import UserError

DRAFTED = (1, 2, 3, 4, 5, 7)


def eval_draft(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run with a draft model.")],
    teacher: Annotated[
        str | None, typer.Option(help="Run or folder of the model that it drafts for. Default: the run's train.distill.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device, such as cuda:1. Default: a GPU if there is one.")] = None,
) -> None:
    """Estimate the gain of a draft model: tokens per step of greedy speculative decoding on held-out prompts.

    strata eval draft laptop-draft-1
    """
    run = runs.find(name)
    if not run.has_export():
        raise UserError(f"Run '{name}' has no export to evaluate.", f"Export its newest checkpoint: strata export {name}")
    recipe = run.recipe()
    given = teacher or recipe.train.distill
    if given is None:
        raise UserError(f"Run '{name}' was not distilled from a model.", "Name the model that it drafts for with --teacher.")
    from rich.table import Table

    from strata.platform.model_families import source
    from strata.training.distillation.acceptance import equal_tokens, tokens_per_step
    from strata.training.quantization import rows
    from strata.training.quantization.model_folder import device_of

    console = Console(highlight=False, soft_wrap=True)
    source.local(given, "--teacher" if teacher else "train.distill")  # its errors name the key
    held_out = rows.of_run(run, recipe.model.context, 1, 0, console).held_out
    equal_pt = equal_tokens(run.export, source.snapshot(given), held_out, device_of(device))
    share = float(equal_pt.float().mean())
    console.print(f"{name} chooses {share:.1%} of {equal_pt.numel():,} greedy tokens of {given}", markup=False)
    table = Table("drafted tokens", "tokens per step", box=None, header_style="bold")
    for drafted in DRAFTED:
        table.add_row(str(drafted), f"{tokens_per_step(equal_pt, drafted):.2f}")
    console.print(table)
