"""Ctrl-C and SIGTERM, as training wants them: before workers run they end the command; then the first asks for a checkpoint
and a clean end, and the second ends the command at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    def __init__(self) -> None:
        self.ask: Callable[[], None] | None = None
        self.asked = False

    def catch(self) -> None:
        """Again once Ray is connected: it takes SIGTERM for itself, and would end the command without a checkpoint."""
        for number in SIGNALS:
            signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.ask is None or self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.ask()


@contextmanager
def caught() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        interrupts.catch()
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
