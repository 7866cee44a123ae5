"""Starts the log shipper of a worker, and makes NCCL and torch write their diagnostics to files.

Runs in each worker before torch's process group exists, because its constructor reads these variables, and because a rendezvous
or an NCCL setup that fails is what the logs are needed for.
"""

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from strata.training.logs import shipper

# Collectives in the flight recorder's ring buffer: enough for several steps of a pipeline.
RECORDED = "2000"


def start(places: Sequence[Path], rank: int) -> None:
    """Copies this process's output to the first of `places` that exists, until the process ends. Failures cost the logs, not the
    run."""
    try:
        scratch = Path(tempfile.mkdtemp(prefix="strata-logs-"))
        sources = [str(path) for number in (1, 2) if (path := _file_behind(number))]
        nccl, flight = _diagnostics(scratch, rank)
        order = {
            "places": [str(place) for place in places],
            "rank": rank,
            "title": f"rank {rank}: process {os.getpid()} on {socket.gethostname()}",
            "sources": list(dict.fromkeys([*sources, nccl])),
            "flight": flight,
            "scratch": str(scratch),
        }
        _spawn(order)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"The logs of rank {rank} are not copied to the run's folder: {error}", file=sys.stderr)


def _spawn(order: dict[str, object]) -> None:
    # Isolated and without site-packages: it starts in 20 ms and needs 10 MB.
    command = [sys.executable, "-I", "-S", shipper.__file__, json.dumps(order)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True
    ) as process:
        assert process.stdin is not None
        # Open until this process ends, by whatever cause: its end of file is how the shipper notices.
        os.dup(process.stdin.fileno())


def _file_behind(number: int) -> Path | None:
    """Ray's log file to which a standard stream of this process is redirected; None for a terminal or a pipe, which Ray uses with
    RAY_ROTATION_MAX_BYTES."""
    try:
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
        path = Path(f"/proc/self/fd/{number}").readlink()
    except OSError:
        return None
    return path if is_file and path.is_file() else None


def _diagnostics(scratch: Path, rank: int) -> tuple[str, str]:
    """Files of NCCL's messages and of the flight recorder's dump. Variables that the user has set stay.

    NCCL writes to standard output through a block buffer, which SIGKILL discards; its own file is line-buffered."""
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    nccl = os.environ.setdefault("NCCL_DEBUG_FILE", str(scratch / "nccl"))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    # Each with its older name, which torch still reads.
    _set("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", RECORDED)
    prefix = _set("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(scratch / "flight-"))
    return nccl.replace("%p", str(os.getpid())).replace("%h", socket.gethostname().partition(".")[0]), f"{prefix}{rank}"


def _set(name: str, older: str, value: str) -> str:
    """Sets a variable unless it is set under either name, and returns its value."""
    return os.environ.get(name) or os.environ.get(older) or os.environ.setdefault(name, value)
