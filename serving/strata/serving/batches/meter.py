"""Counts the requests of the batches that a gateway runs, for its metrics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

Ending = Literal["completed", "failed", "expired"]


class Recorder(Protocol):
    """Metrics of one gateway."""

    def batch_requests(self, waiting: int, running: int) -> None: ...
    def batch_request_ended(self, ending: str) -> None: ...


class Meter:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting = self._running = 0

    @contextmanager
    def waiting(self, requests: int) -> Iterator[Callable[[Ending], None]]:
        """Counts requests of a batch as waiting. Yields a function that records the end of one. Those that have not ended with
        the block are another gateway's, or cancelled."""
        left = requests

        def ended(ending: Ending) -> None:
            nonlocal left
            left -= 1
            self._change(-1, 0)
            self._recorder.batch_request_ended(ending)

        self._change(requests, 0)
        try:
            yield ended
        finally:
            self._change(-left, 0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts one of the waiting requests as running."""
        self._change(-1, 1)
        try:
            yield
        finally:
            self._change(1, -1)

    def _change(self, waiting: int, running: int) -> None:
        self._waiting += waiting
        self._running += running
        self._recorder.batch_requests(self._waiting, self._running)
