"""`strata train` and `strata export`. Light imports only: the command line loads this module to print its help."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer
from rich.console import Console

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe

if TYPE_CHECKING:
    from strata.training.driver import Summary

Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value, such as train.steps=50.")]

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def train(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="A recipe's name, or a path to one.")] = recipe_file.DEFAULT,
    run: Annotated[str | None, typer.Option(help="The new run's name.")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this run, by its own recipe.")] = None,
) -> None:
    """Train a model and export it. Ctrl-C saves a checkpoint; --resume goes on from it."""
    console = Console(highlight=False, soft_wrap=True)
    if resume is None:
        chosen = _anchored(recipe_file.load(recipe, overrides or ()))
        from strata.training import driver

        summary = driver.start(chosen, run, Path(recipe).stem, console)
    else:
        if run is not None:
            raise UserError("--run names a new run; --resume goes on with an old one.", "Give one of them.")
        found = runs.find(resume)
        chosen = _anchored(recipe_file.load(str(found.path / "recipe.yaml"), overrides or ()))
        from strata.training import driver

        summary = driver.resume(found, chosen, console)
    _tell(summary, console)
    if summary.export is None:
        raise typer.Exit(INTERRUPTED)


def export(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    to: Annotated[Path | None, typer.Option(help="A new folder; without it, the run's own export/.")] = None,
) -> None:
    """Write a run's newest good checkpoint as a Hugging Face folder."""
    console = Console(highlight=False, soft_wrap=True)
    found = runs.find(run)
    from strata.training.export import export_run

    console.print(f"exported to {export_run(found, to, console.print)}")


def _anchored(recipe: Recipe) -> Recipe:
    """With data.path absolute, so that a run can be resumed from another folder."""
    if recipe.data.path is None:
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": recipe.data.path.resolve()})})


def _tell(summary: "Summary", console: Console) -> None:
    if summary.val_loss is not None:
        margin = summary.bigram - summary.val_loss
        verdict = f"{abs(margin):.3f} nats per token {'better' if margin > 0 else 'worse'} than the bigram"
        console.print(f"step {summary.step}: validation loss {summary.val_loss:.3f}, bigram {summary.bigram:.3f} ({verdict})")
    if summary.export is None:
        console.print(f"interrupted; go on with: strata train --resume {summary.run.name}")
    else:
        seconds = time.time() - psutil.Process().create_time()
        console.print(f"exported to {summary.export} after {seconds:.0f} s; serve it with: strata serve --run {summary.run.name}")
