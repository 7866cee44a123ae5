"""CUDA Multi-Process Service (MPS) for engines that share a GPU.

Without MPS the GPU switches between processes every few milliseconds, and during a long prefill every token of the other
engine waits for a time slice. With MPS their kernels run concurrently. A large matrix product occupies every free
multiprocessor, so limiting a prefill engine to a share of them reserves the others for the decode engine.
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
    """Pipe directory of this endpoint's MPS daemon. Each endpoint has its own daemon, which ends with it; engines of different
    endpoints on one GPU are time-sliced, as without MPS."""
    return Path(tempfile.gettempdir()) / f"strata-mps-{os.getuid()}-{os.getpid()}"


def environment(share: float | None, gives_way: bool) -> dict[str, str]:
    """Environment of an engine. Without a share it may occupy every free multiprocessor. With `gives_way` its thread blocks
    are scheduled after the others'."""
    found = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes()), "CUDA_MPS_CLIENT_PRIORITY": "1" if gives_way else "0"}
    if share is not None:
        found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * share:g}"
    return found


@contextmanager
def running(section: ServeSection) -> Iterator[None]:
    """Runs the MPS daemon for an endpoint on this machine. On a cluster the nodes must provide it, like the driver."""
    if not wanted(section) or "RAY_ADDRESS" in os.environ:
        yield
        return
    control = shutil.which(CONTROL)
    if control is None:
        raise UserError(f"sm_share needs {CONTROL}, which is not installed.", "Install NVIDIA's MPS, or remove sm_share.")
    pipes().mkdir(exist_ok=True)
    service = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(pipes()), "CUDA_MPS_LOG_DIRECTORY": str(pipes())}
    with processes.started([control, "-f"], pipes() / "control.out", service):
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit -t 5\n", env=service, check=False, capture_output=True, timeout=STOP_LIMIT_S)
    shutil.rmtree(pipes(), ignore_errors=True)  # after an error the folder stays, with the daemon's logs
