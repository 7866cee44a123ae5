"""Progress marks of the training thread.

The training thread writes plain attributes and the monitor thread reads them, so a mark costs no lock and no system call.
"""

from collections import deque

RECENT = 20  # steps whose own time is published


class Pulse:
    def __init__(self) -> None:
        self.phase = "start"
        self.step = 0
        self.marks = 0  # phases entered so far
        self.own_s: deque[float] = deque(maxlen=RECENT)  # seconds of recent steps that depend on no other rank

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.marks += 1

    def stepped(self, step: int, own_s: float) -> None:
        self.step = step
        self.own_s.append(own_s)
