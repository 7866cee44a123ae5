"""Available memory, processor name and processor features of this machine."""

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
    return _cpuinfo("model name") or platform.processor()


def cpu_flags() -> frozenset[str]:
    """Instruction sets of an x86 CPU by the kernel's names; empty for others."""
    return frozenset(_cpuinfo("flags").split())


def _cpuinfo(name: str) -> str:
    """A field of the first processor, empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
