"""Handling of Ctrl-C and SIGTERM during training.

Before the workers run, a signal ends the command. Afterwards the first signal requests a stop with a checkpoint, and the second
ends the command immediately.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    def __init__(self) -> None:
        self.request_stop: Callable[[], None] | None = None
        self.stop_requested = False

    def catch(self) -> None:
        """Installs the handlers. Called again after `ray.init`, which installs its own SIGTERM handler and would end the command
        without a checkpoint."""
        for number in SIGNALS:
            signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.request_stop is None or self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True
        self.request_stop()


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
