"""Step time by phase. On a GPU, which runs asynchronously, phases are timed by CUDA events that are read at the end of the step,
so no measurement adds a synchronization."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Stopwatch:
    def __init__(self, device: torch.device, entered: Callable[[str], None] = lambda phase: None) -> None:
        self._entered = entered
        self._gpu = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.ranges: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()  # a profile names phases

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._entered(name)
        with self.ranges(name), self._timed(name):
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if self._gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            begin_s = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - begin_s

    def read(self) -> dict[str, float]:
        """Returns seconds by phase since the last call, and resets them."""
        if self._events:
            self._events[-1][2].synchronize()
        for name, begin, end in self._events:
            self._seconds[name] += begin.elapsed_time(end) / 1000
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return seconds
