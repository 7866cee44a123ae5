"""Folders of logs: `runs/<run>/logs/attempt-<K>/{rank-<N>.log, flight-<N>}`, one attempt per start of the workers.

A run that ends before its first step leaves no folder. Its logs, which have the reason, move to `.strata/logs/<run>`.
"""

import re
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from strata.platform.files import cache_dir
from strata.platform.runs import Run
from strata.training.logs import capture

NAME = re.compile(r"attempt-([1-9]\d*)")
MOST_ATTEMPTS = 10  # older ones are deleted


def folder(run: Run) -> Path:
    return run.path / "logs"


def set_aside_folder(run: Run) -> Path:
    return cache_dir() / "logs" / run.name


def every(logs: Path) -> dict[int, Path]:
    """Attempts by number, ascending."""
    try:
        found = [(NAME.fullmatch(path.name), path) for path in logs.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def begin(run: Run) -> Callable[[int], None]:
    """Creates the folder of the next attempt and returns the function that each worker calls with its rank. Storage that cannot
    be written costs the logs, not the run."""
    logs = folder(run)
    older = every(logs)
    name = f"attempt-{max(older, default=0) + 1}"
    try:
        (logs / name).mkdir(parents=True)
    except OSError as error:
        print(f"This start of the workers has no logs: {error}", file=sys.stderr)
        return _without_logs
    stale = [path for number, path in older.items() if number <= max(older) + 1 - MOST_ATTEMPTS]
    # In the background: a mounted bucket deletes the files of a thousand ranks one by one.
    threading.Thread(target=_remove, args=(stale,), daemon=True).start()
    return partial(capture.start, (logs / name, set_aside_folder(run) / name))


def set_aside(run: Run) -> None:
    """Moves the logs of a run whose folder will be deleted, in place of those of an earlier run of that name."""
    logs, to = folder(run), set_aside_folder(run)
    with suppress(OSError):  # without logs, or on storage that is full: the folder is deleted all the same
        shutil.rmtree(to, ignore_errors=True)
        to.parent.mkdir(parents=True, exist_ok=True)
        logs.rename(to)


def _without_logs(rank: int) -> None:
    """Takes the place of `capture.start`."""


def _remove(folders: list[Path]) -> None:
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
