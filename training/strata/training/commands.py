"""`strata train` and `strata export`. Light imports only: the command line loads this module to print its help."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import psutil
import typer
from rich.console import Console

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.ray_cluster.watch import ClusterDied
from strata.platform.recipe import Recipe
from strata.platform.recipe_file import Overrides

if TYPE_CHECKING:
    from strata.training.driver import Summary


INTERRUPTED = 130  # what a shell reports for Ctrl-C
RESTARTS = "STRATA_CLUSTER_RESTARTS"  # of a cluster that this command had started, so far
MOST_RESTARTS = 3


def train(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="A recipe's name, or a path to one.")] = recipe_file.DEFAULT,
    run: Annotated[str | None, typer.Option(help="The new run's name.")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this run, by its own recipe.")] = None,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Go on with --run if it exists, by the recipe given: for jobs that are retried.")
    ] = False,
) -> None:
    """Train a model and export it. Ctrl-C saves a checkpoint; --resume goes on from it."""
    console = Console(highlight=False, soft_wrap=True)
    if resume is not None and (run is not None or or_resume):
        raise UserError("--run names a new run; --resume goes on with an old one.", "Give one of them.")
    if or_resume and run is None:
        raise UserError("--or-resume goes on with a run if it exists, and has to know which.", "Name it with --run.")
    old = runs.find(resume) if resume is not None else None
    if old:
        old.recipe()  # refused with a word on the run, if it cannot be read
    chosen = _anchored(recipe_file.load(str(old.path / "recipe.yaml") if old else recipe, overrides or ()))
    from strata.training import driver

    summary: Summary | None
    try:
        if old:
            summary = driver.resume(old, chosen, console)
        elif run is not None and or_resume:
            summary = driver.start_or_resume(chosen, run, Path(recipe).stem, console)
        else:
            summary = driver.start(chosen, run, Path(recipe).stem, console)
    except ClusterDied as death:
        _go_on_in_a_new_cluster(death, console)
    if summary is None:
        console.print(f"Run '{run}' is finished already; serve it with: strata serve --run {run}")
        return
    _tell(summary, console)
    if summary.export is None:
        raise typer.Exit(INTERRUPTED)


def _go_on_in_a_new_cluster(death: ClusterDied, console: Console) -> NoReturn:
    """Resumes the run in a fresh image of this process: Ray cannot be started again where a dead cluster is waited for. A
    machine on which Ray dies again and again needs somebody to look."""
    restarts = int(os.environ.get(RESTARTS, "0"))
    if death.run is None or restarts >= MOST_RESTARTS:
        raise death
    console.print(f"{death.cause} It is started again, and the run goes on from its newest checkpoint.")
    sys.stdout.flush()
    main = "from strata.platform.cli import main; main()"
    os.environ[RESTARTS] = str(restarts + 1)
    os.execv(sys.executable, [sys.executable, "-c", main, "train", "--resume", death.run])


def export(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    to: Annotated[Path | None, typer.Option(help="A new folder; without it, the run's own export/.")] = None,
) -> None:
    """Write a run's newest good checkpoint as a Hugging Face folder."""
    console = Console(highlight=False, soft_wrap=True)
    found = runs.find(run)
    from strata.training.checkpoint.export import export_run

    console.print(f"exported to {export_run(found, to, console.print)}")


def _anchored(recipe: Recipe) -> Recipe:
    """With data.path and train.checkpoints absolute, so that a run can be resumed from another folder."""
    data, section = recipe.data, recipe.train
    if data.path is not None:
        data = data.model_copy(update={"path": data.path.absolute()})
    if section.checkpoints is not None and "://" not in section.checkpoints:
        section = section.model_copy(update={"checkpoints": str(Path(section.checkpoints).absolute())})
    return recipe.model_copy(update={"data": data, "train": section})


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
