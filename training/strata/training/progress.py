"""The live bar in a terminal; in a log, a line at each evaluation and now and then between."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from strata.training.records import Record

LINE_EVERY_S = 10.0


class TrainingProgress:
    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._line_due = 0.0
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, note="starting the workers")

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, record: Record) -> None:
        note = f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s"
        self._bar.update(self._task, completed=record["step"], note=note)
        if self._console.is_terminal:
            return
        if "val_loss" in record or time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + LINE_EVERY_S
            validation = f"  validation {record['val_loss']:.3f}" if "val_loss" in record else ""
            self._console.print(f"step {record['step']}/{self._steps}  {note}{validation}")
