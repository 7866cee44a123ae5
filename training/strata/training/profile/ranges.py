"""Named ranges of a trace: phases, layers, collectives.

Each range also records how long its thread had waited for a processor at its beginning and at its end. Without that time, a trace
from a busy machine shows what it would on an idle one.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd.profiler import record_function

from strata.platform.profile.processor_wait import ProcessorWait
from strata.platform.profile.trace import PREFIX


class Ranges:
    """Ranges of one thread. `delays` are in seconds, at the beginning and the end of the n-th range of a name."""

    def __init__(self) -> None:
        self.delays: dict[str, list[list[float]]] = {}
        self._collections: list[record_function] = []
        self._wait = ProcessorWait()

    def close(self) -> None:
        self._wait.close()

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        entry = [self._wait.seconds(), 0.0]
        self.delays.setdefault(name, []).append(entry)
        with record_function(PREFIX + name):
            yield
        entry[1] = self._wait.seconds()

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
