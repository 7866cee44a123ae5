"""Named ranges of a trace: phases, layers, collectives.

Each range also records how long its thread had waited for a processor at its beginning and at its end. Without that time, a trace
from a busy machine shows what it would on an idle one.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd.profiler import record_function

from strata.platform.profile.trace import PREFIX

SCHEDSTAT = "/proc/thread-self/schedstat"  # nanoseconds on a processor, nanoseconds in its queue, time slices


class Ranges:
    """Ranges of one thread. `delays` are in seconds, at the beginning and the end of the n-th range of a name."""

    def __init__(self) -> None:
        self.delays: dict[str, list[list[float]]] = {}
        self._collections: list[record_function] = []
        self._schedstat = os.open(SCHEDSTAT, os.O_RDONLY) if sys.platform == "linux" else None

    def close(self) -> None:
        if self._schedstat is not None:
            os.close(self._schedstat)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        entry = [self._delay(), 0.0]
        self.delays.setdefault(name, []).append(entry)
        with record_function(PREFIX + name):
            yield
        entry[1] = self._delay()

    def _delay(self) -> float:
        return 0.0 if self._schedstat is None else int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    @contextmanager
    def garbage_collections(self) -> Iterator[None]:
        """Makes a range of every collection of Python's garbage."""
        gc.callbacks.append(self._collecting)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            opened = record_function(f"{PREFIX}gc {info['generation']}")
            opened.__enter__()  # type: ignore[no-untyped-call]
            self._collections.append(opened)
        elif self._collections:
            self._collections.pop().__exit__(None, None, None)
