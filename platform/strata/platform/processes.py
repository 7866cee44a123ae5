"""Child processes: environment, termination with the parent, termination of process trees, identity of a PID."""

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
GRACE_S = 15.0  # Prometheus flushes its memory to disk on SIGTERM


def is_alive(pid: int, created: float) -> bool:
    """True if the process created at that time still runs. The kernel may have reused its PID."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - created) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ending_with_us() -> Callable[[], None]:
    """A `preexec_fn` with which the kernel sends the child SIGTERM when this process ends for any reason.

    Start the child from the main thread: the kernel watches the thread that started it, not the process."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def set_death_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return set_death_signal


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables until the block ends, and restores the previous values."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def last_lines(log: Path, count: int = 15) -> str:
    """The last non-empty lines of a child's log, for an error message."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return "\n".join(line[:300] for line in lines[-count:])


@contextmanager
def started(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a child process until the block ends. If this process is killed, the kernel sends the child SIGTERM.

    The child has its own process group: Ctrl-C reaches only this process, which then stops the child in order."""
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
    """Terminates processes, the process groups they lead, and all their descendants, also after a second Ctrl-C.

    Ray and vLLM put descendants into sessions of their own, which a signal to the process group does not reach."""
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
            with suppress(ProcessLookupError):  # leads no group, or the group is empty
                os.killpg(process.pid, signal.SIGKILL)
        for straggler in family:
            with suppress(psutil.NoSuchProcess):
                straggler.kill()
        psutil.wait_procs(family, timeout=STRAGGLERS_S)
