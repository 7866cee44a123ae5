"""Timers for device time and for the host time of a launch."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Run = Callable[[], Any]
FEWEST_RUNS, MOST_RUNS = 3, 200
CACHE_BYTES = 2**30  # far more than any L2: clearing it keeps the device busy for longer than the host prepares a run


def milliseconds(run: Run, device: torch.device, budget: float, fewest: int = FEWEST_RUNS) -> float:
    """Median of as many runs as fit into `budget` milliseconds, at least `fewest`. On a GPU, the L2 cache is cleared before
    each."""
    timed = _gpu_times if device.type == "cuda" else _cpu_times
    first = statistics.median(timed(run, fewest))
    fitting = min(int(budget / max(first, 1e-6)), MOST_RUNS)
    return first if fitting <= fewest else statistics.median(timed(run, fitting))


def _gpu_times(run: Run, count: int) -> list[float]:
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2))
    run()
    for start, end in zip(starts, ends, strict=True):
        cache.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def _cpu_times(run: Run, count: int) -> list[float]:
    run()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def host_microseconds(run: Run, calls: int = 100, batches: int = 7) -> float:
    """Host time of a call while the device keeps up: the median over batches of calls without synchronization. The first batch
    is a warm-up."""
    times = []
    for _ in range(1 + batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times[1:])
