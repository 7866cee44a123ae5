"""Available memory and processor name of this machine."""

import platform
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Available bytes: the system's figure, or what is left of the container's limit if that is lower."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
    except (FileNotFoundError, ValueError):  # no control groups, or no limit ("max")
        return free
    return min(free, max(0, limit))


def processor() -> str:
    """The CPU model name. `platform.processor()` is empty on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
