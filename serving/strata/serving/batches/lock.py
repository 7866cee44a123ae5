"""Lock of a batch by the gateway that runs it.

A file lock instead of a lease with a clock: the kernel frees it in the moment its process is killed, and a process that was only
paused still holds it, so two gateways can never write the same output.
"""

import fcntl
import os
from pathlib import Path


class Lock:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def release(self) -> None:
        os.close(self._handle)


def acquire(path: Path) -> Lock | None:
    """The lock, None while another gateway holds it. Raises OSError on a file system without locks."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return Lock(handle)
