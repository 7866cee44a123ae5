"""Processes that a command starts: their end with it, the end of their families, and telling them from strangers."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
STRAGGLERS_S = 20.0
GRACE_S = 15.0  # Prometheus writes what it has in memory


def is_alive(pid: int, created: float) -> bool:
    """Whether the process that was created then still runs: a stranger may have got its number later."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - created) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ending_with_us() -> Callable[[], None]:
    """A `preexec_fn`: the kernel sends the child SIGTERM when this process ends, however it ends. Started from the main thread,
    for it is the end of the thread that counts."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def share_fate() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return share_fate


def last_lines(log: Path, count: int = 15) -> str:
    """The end of what a child wrote, to show why it ended."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return "\n".join(line[:300] for line in lines[-count:])


@contextmanager
def started(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Ends with the block, and with this process even if that is killed: the kernel sends the child SIGTERM.

    In a group of its own, so that Ctrl-C in the terminal reaches this process first and the end is in order."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=None if env is None else dict(env),
            process_group=0,
            preexec_fn=ending_with_us(),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stop_family(processes: Sequence[subprocess.Popen[bytes]], limit_s: float = 60.0) -> None:
    """Ends them, their process groups where they have their own, and all their descendants, which Ray and vLLM put into sessions
    of their own; also after a second Ctrl-C."""
    family: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=limit_s)
        psutil.wait_procs(family, timeout=STRAGGLERS_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            with suppress(ProcessLookupError):  # it leads no group, or nobody is left of it
                os.killpg(process.pid, signal.SIGKILL)
        for straggler in family:
            with suppress(psutil.NoSuchProcess):
                straggler.kill()
        psutil.wait_procs(family, timeout=STRAGGLERS_S)
