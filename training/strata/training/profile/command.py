"""`strata profile train` and `profile run`. Imports nothing heavy: every command loads this module.

Where the package is not installed and so has no entry points: `python -m strata.training.profile.command train --help`.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from strata.platform import recipe_file
from strata.platform.recipe_file import Overrides


def profile_train(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="Recipe name, or path to a recipe file.")] = recipe_file.DEFAULT,
    steps: Annotated[str, typer.Option(help="Steps to profile, from 2 on.")] = "10..14",
    ranks: Annotated[str, typer.Option(help="Ranks to profile, such as 0,1.")] = "all",
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Train as 'strata train', or the same loop without Ray.")] = True,
    tool: Annotated[
        str, typer.Option(help="torch, or a program that each rank runs under, without Ray: nsys (timeline) or ncu (kernels).")
    ] = "torch",
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: profile/train in the cache folder.")] = None,
) -> None:
    """Train a few steps and profile some of them: findings, a report, and traces for Perfetto."""
    from strata.platform.files import cache_dir
    from strata.training.bench.ours import has_ray
    from strata.training.profile import nsight, request, session
    from strata.training.profile.report import present

    chosen = recipe_file.load(recipe, overrides or ())
    first, last = request.parse_steps(steps)
    wanted = request.Request(
        request.new_id(), first, last, request.parse_ranks(ranks, chosen.parallel.workers), nsight.parse(tool)
    )
    console, target = Console(highlight=False, soft_wrap=True), out or cache_dir() / "profile" / "train"
    session.train(chosen, wanted, target, ray and has_ray(), console)
    if wanted.tool != "torch":
        console.print(f"written to {target}: rank*.{nsight.REPORTS[wanted.tool]}, for the program's own viewer")
        return
    present.report(target, chosen, console)


def profile_run(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run that is being trained.")],
    steps: Annotated[int, typer.Option(help="Steps to profile.", min=1)] = 5,
    ranks: Annotated[str, typer.Option(help="Ranks to profile, such as 0,1.")] = "all",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the profile.", min=1)] = 600.0,
) -> None:
    """Profile the next steps of a running run. The report and the traces are written into its folder."""
    from strata.platform import runs
    from strata.training.profile import attach, request
    from strata.training.profile.report import present

    console, run = Console(highlight=False, soft_wrap=True), runs.find(name)
    recipe = run.recipe()
    wanted = attach.ask(run, recipe, steps, request.parse_ranks(ranks, recipe.parallel.workers))
    with console.status("") as status:
        folder = attach.wait(run, recipe, wanted, timeout, status.update)
    present.report(folder, recipe, console)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    app.command("train")(profile_train)
    app.command("run")(profile_run)
    app()
