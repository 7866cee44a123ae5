"""Profile of a run that another process trains: a request in its folder, and the wait for the traces."""

import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.platform.runs import Run
from strata.training.metrics import records
from strata.training.metrics.records import Record
from strata.training.profile import request
from strata.training.profile.request import LOOK_EVERY_S, Request

AHEAD_S = 3 * LOOK_EVERY_S  # until every rank has read a request
POLL_S = 0.2
RECENT = 20  # records that predict the time of a step


def ask(run: Run, recipe: Recipe, steps: int, ranks: tuple[int, ...]) -> Request:
    """Requests a profile of `steps` steps that begin when all ranks know of it."""
    status = run.state().observed_status()
    if not status.startswith("running"):
        raise UserError(f"Run '{run.name}' is {status}; only a running one can be profiled.", "Use 'strata profile train'.")
    history = records.read(run.metrics)[-RECENT:]
    first = (history[-1]["step"] if history else 1) + 2 + math.ceil(AHEAD_S / step_seconds(history))
    if first + steps > recipe.train.steps:
        raise UserError(f"Run '{run.name}' has too few steps left to profile {steps}.", "Profile fewer steps with --steps.")
    wanted = Request(request.new_id(), first, first + steps - 1, ranks)
    request.write(run.path, wanted)
    return wanted


def step_seconds(history: list[Record]) -> float:
    """Seconds from record to record; for a run without two of them, as long as ranks take to read a request."""
    seconds = [after["time"] - before["time"] for before, after in pairwise(history)]
    return max(median(seconds), 1e-3) if seconds else AHEAD_S


def wait(run: Run, recipe: Recipe, wanted: Request, timeout_s: float, tell: Callable[[str], None]) -> Path:
    """Waits for the traces of all ranks, and returns their folder."""
    folder, ranks = wanted.folder(run.path), wanted.ranks or tuple(range(recipe.parallel.workers))
    deadline = time.monotonic() + timeout_s
    while True:
        missing = [rank for rank in ranks if not (folder / f"rank{rank}.json").exists()]
        if not missing:
            return folder
        ended = not run.state().observed_status().startswith("running")
        if ended or time.monotonic() > deadline:
            why = "ended" if ended else f"wrote no profile within {timeout_s:g} s"
            raise UserError(f"Run '{run.name}' {why}; ranks {', '.join(map(str, missing))} are missing.", "Try again.")
        tell(f"waiting for steps {wanted.first} to {wanted.last} of run '{run.name}'; {len(missing)} ranks are missing")
        time.sleep(POLL_S)
