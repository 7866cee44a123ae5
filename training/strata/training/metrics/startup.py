"""Startup time by phase, which `strata train` prints with the first step."""

import time
from contextlib import suppress

import psutil


class Startup:
    """Consecutive phases since the start of this process."""

    def __init__(self, began: float | None = None, phases: dict[str, float] | None = None) -> None:
        self.began = psutil.Process().create_time() if began is None else began
        self.phases = dict(phases or {})

    def done(self, phase: str, at: float | None = None) -> None:
        """Ends a phase now, or at the Unix time `at`. It began when the previous phase ended."""
        self.phases[phase] = (time.time() if at is None else at) - self.began - sum(self.phases.values())

    def line(self) -> str:
        parts = " · ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.phases.items())
        return f"first step after {sum(self.phases.values()):.1f} s ({parts}), {_processor_seconds():.0f} s of processor time"


def _processor_seconds() -> float:
    """CPU seconds of this process and its descendants, such as a Ray cluster that it started."""
    seconds = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds
