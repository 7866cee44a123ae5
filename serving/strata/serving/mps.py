"""Engines that share a GPU at the same time, by CUDA's Multi-Process Service, instead of taking turns on it.

Without it the GPU switches between processes every few milliseconds, and while a long prompt is prefilled every token of the
other engine waits for such a turn. With it their kernels run side by side; but a large matrix product takes every
multiprocessor it finds, so a prefill engine that is kept to a share of them leaves the others to the decode engine always.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strata.platform import processes
from strata.platform.errors import UserError
from strata.platform.recipe import ServeSection

CONTROL = "nvidia-cuda-mps-control"
STOP_LIMIT_S = 10.0


def wanted(section: ServeSection) -> bool:
    return section.device == "gpu" and any(pool.sm_share is not None for pool in (section.prefill, section.decode))


def pipes() -> Path:
    """Where engines find the service of this endpoint's process. Each has its own, which ends with it: engines of several
    endpoints on one GPU take turns, as without it."""
    return Path(tempfile.gettempdir()) / f"strata-mps-{os.getuid()}-{os.getpid()}"


def environment(share: float | None, gives_way: bool) -> dict[str, str]:
    """Of an engine. Without a share it may take every multiprocessor that is free; one that gives way has its blocks of threads
    scheduled after the others', where both wait for room."""
    found = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes()), "CUDA_MPS_CLIENT_PRIORITY": "1" if gives_way else "0"}
    if share is not None:
        found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * share:g}"
    return found


@contextmanager
def running(section: ServeSection) -> Iterator[None]:
    """For an endpoint on this machine. On a cluster it is a node's own business, as its driver is."""
    if not wanted(section) or "RAY_ADDRESS" in os.environ:
        yield
        return
    control = shutil.which(CONTROL)
    if control is None:
        raise UserError(f"sm_share needs {CONTROL}, which is not here.", "Install NVIDIA's MPS, or leave sm_share out.")
    pipes().mkdir(exist_ok=True)
    service = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(pipes()), "CUDA_MPS_LOG_DIRECTORY": str(pipes())}
    with processes.started([control, "-f"], pipes() / "control.out", service):
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit -t 5\n", env=service, check=False, capture_output=True, timeout=STOP_LIMIT_S)
    shutil.rmtree(pipes(), ignore_errors=True)  # kept where something went wrong: its logs may say what
