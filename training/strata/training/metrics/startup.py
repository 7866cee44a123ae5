"""Where the seconds before the first step went, for the line that `strata train` prints with it."""

import time
from contextlib import suppress

import psutil


class Startup:
    """Phases one after another, from the start of this process on."""

    def __init__(self, began: float | None = None, phases: dict[str, float] | None = None) -> None:
        self.began = psutil.Process().create_time() if began is None else began
        self.phases = dict(phases or {})

    def done(self, phase: str, at: float | None = None) -> None:
        """The phase ends now, or ended at the Unix time `at`; it began when the one before it ended."""
        self.phases[phase] = (time.time() if at is None else at) - self.began - sum(self.phases.values())

    def line(self) -> str:
        parts = " · ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.phases.items())
        return f"first step after {sum(self.phases.values()):.1f} s ({parts}), {_processor_seconds():.0f} s of processor time"


def _processor_seconds() -> float:
    """Of this process and all under it, such as a Ray cluster that it has started."""
    seconds = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds
