"""CPU and memory load of this machine, which `strata top` shows if there is no GPU."""

from dataclasses import dataclass

import psutil

from strata.platform.hardware.machine import available_memory


@dataclass(frozen=True)
class Cores:
    loads: tuple[float, ...]  # of each core since the previous poll, 0 to 1
    memory_available: int  # bytes
    memory_total: int


def poll() -> Cores:
    loads = tuple(percent / 100 for percent in psutil.cpu_percent(percpu=True))
    return Cores(loads, available_memory(), int(psutil.virtual_memory().total))
