"""Named ranges of a trace: phases, layers, collectives. Each also records its thread's and its process's CPU time, which a busy
machine does not stretch as it does wall time."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.autograd.profiler import record_function

PREFIX = "strata:"  # of every range's name in the trace


@dataclass
class Ranges:
    """Ranges of one profile, in the order of their beginnings. Times are in seconds."""

    clocks: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)  # wall, thread, process, by name
    _collection: list[record_function] = field(default_factory=list)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        begin = (time.perf_counter(), time.thread_time(), time.process_time())
        with record_function(PREFIX + name):
            yield
        now = (time.perf_counter(), time.thread_time(), time.process_time())
        wall, thread, process = (after - before for after, before in zip(now, begin, strict=True))
        self.clocks.setdefault(name, []).append((wall, thread, process))

    def collecting(self, phase: str, info: dict[str, int]) -> None:
        """Callback of Python's garbage collector."""
        if phase == "start":
            opened = record_function(f"{PREFIX}gc {info['generation']}")
            opened.__enter__()  # type: ignore[no-untyped-call]
            self._collection.append(opened)
        elif self._collection:
            self._collection.pop().__exit__(None, None, None)

    @contextmanager
    def garbage_collections(self) -> Iterator[None]:
        gc.callbacks.append(self.collecting)
        try:
            yield
        finally:
            gc.callbacks.remove(self.collecting)
