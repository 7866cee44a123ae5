"""Progress display: a live bar in a terminal; in a log, a line per evaluation and at intervals between."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from strata.training.metrics.records import Record, perplexity
from strata.training.metrics.startup import Startup

LINE_EVERY_S = 10.0


class TrainingProgress:
    def __init__(self, console: Console, steps: int, startup: Startup | None = None) -> None:
        self._console = console
        self._steps = steps
        self._startup = startup
        self._began = startup.began if startup else None
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

    def starting(self, phase: str) -> None:
        """Shows a phase of the workers before their first step."""
        self._bar.update(self._task, note=phase)
        if not self._console.is_terminal and time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + LINE_EVERY_S
            self._console.print(phase, markup=False)

    def show(self, record: Record) -> None:
        if self._startup and record["time"] > self._startup.began:  # not a step from before a resume
            self._startup.done("workers", record["time"])
            self._console.print(self._startup.line())
            self._startup = None
        self._steps = record.get("plan", {}).get("steps", self._steps)
        note = _note(record)
        self._bar.update(self._task, total=self._steps, completed=record["step"], note=note)
        evaluated = "val_loss" in record
        if evaluated or (not self._console.is_terminal and time.monotonic() >= self._line_due):
            self._line_due = time.monotonic() + LINE_EVERY_S
            details = _details(record) if evaluated else ""
            if evaluated and self._began is not None:
                details += f"  after {record['time'] - self._began:.0f} s"
            self._console.print(f"step {record['step']}/{self._steps}  {note}{details}")


def _note(record: Record) -> str:
    parts = [f"loss {record['loss']:.3f}"]
    if record["grad_norm"] is not None:
        parts.append(f"gradient {record['grad_norm']:.2f}")
    pictures = record.get("pictures_per_s")
    rate = f"{record['tokens_per_s']:,.0f} tokens/s" if pictures is None else f"{pictures:,.0f} pictures/s"
    parts += [f"lr {record['lr']:.1e}", rate]
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.0%}")
    return "  ".join(parts)


def _details(record: Record) -> str:
    """Validation loss and perplexity, time by phase and peak memory: too long for the progress bar."""
    found = perplexity(record)
    parts = [f"  validation {record['val_loss']:.3f}" + (f" (perplexity {found:.4g})" if found is not None else "")]
    if taught := record.get("distillation"):
        parts.append(f"agrees with the teacher {taught['agreement']:.1%}")
    seconds = record.get("seconds", {})
    if total := sum(seconds.values()):
        parts.append(", ".join(f"{phase} {spent / total:.0%}" for phase, spent in seconds.items()))
    if "peak_memory_bytes" in record:
        parts.append(f"{record['peak_memory_bytes'] / 2**30:.1f} GiB")
    return "  ".join(parts)
