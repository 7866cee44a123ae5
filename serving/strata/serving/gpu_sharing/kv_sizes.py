"""Sizes of KV caches that engines measured at their start, for later starts with the same settings.

An engine with a recorded size skips vLLM's trial capture of CUDA graphs, which takes as long as the capture itself. vLLM's own
record (VLLM_ENABLE_STARTUP_PLAN) is not used on a shared GPU: it applies only while as much memory is free as at the measurement,
and its key has no share of the memory.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from strata.platform.files import write_atomic


def key(settings: Mapping[str, object]) -> str:
    """Name of a record. `settings`: all that the size depends on."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:24]


def read(folder: Path, name: str) -> int | None:
    with suppress(OSError, ValueError):  # a record is worth a few seconds, not a failed start
        size = json.loads((folder / f"{name}.json").read_text())
        return size if isinstance(size, int) and size > 0 else None
    return None


def write(folder: Path, name: str, size: int) -> None:
    with suppress(OSError):
        write_atomic(folder / f"{name}.json", json.dumps(size))
