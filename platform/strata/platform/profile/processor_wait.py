"""Time in which a thread waits for a processor that other processes use. Zero where the system does not count it."""

import os
import sys

SCHEDSTAT = "/proc/thread-self/schedstat"  # nanoseconds on a processor, nanoseconds in its queue, time slices


class ProcessorWait:
    """Wait of the thread that creates it."""

    def __init__(self) -> None:
        self._file = os.open(SCHEDSTAT, os.O_RDONLY) if sys.platform == "linux" else None

    def seconds(self) -> float:
        """Since the start of the thread."""
        return 0.0 if self._file is None else int(os.pread(self._file, 64, 0).split()[1]) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
