"""Where the seconds before the first step went, for the line that `strata train` prints with it."""

import time

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
        return f"first step after {sum(self.phases.values()):.1f} s ({parts})"
