"""Commands `eval` and `eval compare`. Light imports only: `strata --help` loads this module."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from strata.platform.errors import UserError

if TYPE_CHECKING:
    from strata.training.evaluation.subject import Subject
    from strata.training.metrics.evaluations import Evaluation

INTERRUPTED = 130  # exit code that a shell reports for Ctrl-C


def evaluate(
    ctx: typer.Context,
    tasks: Annotated[str, typer.Option(help="Tasks, groups or YAML files, with commas between.")] = "python_lines",
    limit: Annotated[int | None, typer.Option(help="Samples of each task. Default: all.", min=1)] = None,
    shots: Annotated[int | None, typer.Option(help="Examples in each prompt. Default: as the task defines.", min=0)] = None,
    include: Annotated[list[Path] | None, typer.Option(help="Folder with YAML files of tasks; may be repeated.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Write prompts with the model's chat template.")] = False,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut the beginning of prompts that are too long.")] = False,
    batch: Annotated[int, typer.Option(help="Sequences of a forward pass, or of a request to an endpoint.", min=1)] = 8,
    device: Annotated[str | None, typer.Option(help="Device, such as cuda:1. Default: a GPU if there is one.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub id of an endpoint's tokenizer. Default: that of the run it serves.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the result to this file.")] = None,
) -> None:
    """Score a model with lm-evaluation-harness: the export of a run, a model folder, or an endpoint.

    strata eval laptop-1 --tasks python_lines
    """
    if ctx.invoked_subcommand:
        return
    if len(ctx.args) != 1:
        cause = f"strata eval takes one run, model folder or address, not {len(ctx.args)}."
        raise UserError(cause, "Write 'strata eval RUN'; 'strata eval compare RUN RUN' compares runs.")
    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if not names:
        raise UserError("--tasks names no task.", "Name one or more, with commas between: --tasks python_lines")
    from strata.training.evaluation import evaluate as running
    from strata.training.evaluation import subject
    from strata.training.metrics.evaluations import Settings

    console = Console(highlight=False, soft_wrap=True)
    found = subject.resolve(ctx.args[0])
    settings = Settings(names, limit, shots, chat, truncate)
    try:
        evaluation = running.evaluate(
            found, settings, console, include=include or (), device=device, tokenizer=tokenizer, batch=batch
        )
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written")
        raise typer.Exit(INTERRUPTED) from None
    path = running.store(found, evaluation, json)
    _print(found, evaluation, console)
    console.print(f"written to {path}", markup=False)


def _print(subject: "Subject", evaluation: "Evaluation", console: Console) -> None:
    from rich.table import Table

    from strata.training.evaluation.compare import cell

    step = "" if subject.step is None else f" at step {subject.step}"
    console.print(f"{subject.name}{step}, {evaluation.seconds:.0f} s", markup=False)
    table = Table("task", "metric", "value", "shots", "samples", "version", box=None, header_style="bold")
    for score in evaluation.scores:
        shots = "" if score.shots is None else str(score.shots)
        table.add_row(score.task, score.metric, cell(score), shots, str(score.samples), score.version or "")
    console.print(table)
    if evaluation.truncated:
        console.print(f"{evaluation.truncated} prompts were too long and lost their beginning: the scores are not comparable.")


def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, or files that 'strata eval --json' wrote.")],
    plot: Annotated[
        Path | None, typer.Option(help="PNG file to write. Default: evaluations/compare.png in Strata's cache.")
    ] = None,
) -> None:
    """Compare the newest scores of runs, with their standard errors, in a table and a plot."""
    from strata.platform.files import cache_dir
    from strata.training.evaluation import compare as comparing

    console = Console(highlight=False, soft_wrap=True)
    columns = comparing.read(names, lambda line: console.print(line, markup=False))
    comparing.show(columns, console)
    path = plot or cache_dir() / "evaluations" / "compare.png"
    comparing.plot(columns, path)
    console.print(f"written to {path}", markup=False)
