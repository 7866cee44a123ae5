"""Progress of an evaluation: a live bar in a terminal; in a log, a line at intervals."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0


class RequestProgress:
    """Counts the requests of each task that the model has answered."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line_due = time.monotonic() + LINE_EVERY_S
        self._task, self._done = "", 0
        self._total: int | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._row = self._bar.add_task("starting", total=None)

    def __enter__(self) -> "RequestProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, task: str, requests: int | None) -> None:
        self._task, self._done, self._total = task, 0, requests
        self._bar.reset(self._row, description=task, total=requests)

    def advance(self, requests: int) -> None:
        self._done += requests
        self._bar.update(self._row, completed=self._done)
        if not self._console.is_terminal and time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + LINE_EVERY_S
            self._console.print(self.position)

    @property
    def position(self) -> str:
        of = "" if self._total is None else f" of {self._total}"
        return f"{self._task}: {self._done}{of} requests"
