"""Command `logs`. Light imports only: `strata --help` loads this module."""

import sys
from typing import Annotated

import typer


def logs(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    rank: Annotated[int | None, typer.Option(min=0, help="Only this worker. Default: all, each line with its rank.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="This start of the workers. Default: the newest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more lines until the run ends.")] = False,
) -> None:
    """Show the output of a run's workers, with NCCL's warnings, and the flight recorder's dumps."""
    from strata.training.logs import reading

    selection = reading.Selection(run, attempt, rank)
    try:
        for line in reading.lines(selection, follow):
            sys.stdout.buffer.write(line)
            if follow:
                sys.stdout.buffer.flush()
    except KeyboardInterrupt:  # how --follow ends
        pass
    sys.stdout.buffer.flush()
    number, folder = selection.found()
    if dumps := selection.dumps(folder):
        names = ", ".join(path.name for path in dumps)
        print(f"[strata] flight recorder of attempt {number}: {names} in {folder}", file=sys.stderr)
        print(f"[strata] read all of them with: torchfrtrace {folder} --prefix flight-", file=sys.stderr)
