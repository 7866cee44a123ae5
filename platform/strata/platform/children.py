"""Programs that live no longer than the command which started them."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1
GRACE_S = 15.0  # Prometheus writes what it has in memory


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
