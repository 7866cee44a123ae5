"""Ctrl-C and SIGTERM, as training wants them: before workers run they end the command; then the first asks for a checkpoint
and a clean end, and the second ends the command at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    def __init__(self) -> None:
        self.ask: Callable[[], None] | None = None
        self.asked = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.ask is None or self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.ask()


@contextmanager
def caught() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    before = {number: signal.signal(number, interrupts.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
