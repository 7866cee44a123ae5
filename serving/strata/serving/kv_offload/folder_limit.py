"""Limits the size of a folder of block files, which several engines of a node share.

Every engine counts what it writes, and sweeps the folder after each thirty-second part of the limit: above 7/8 of the limit, the
least recently used files are deleted down to 3/4. So up to four engines never exceed the limit, and each further one by a
thirty-second part at most. A lock lets one of them sweep at a time.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from strata.serving.kv_offload.block_file import TEMPORARY

BLOCK = ".bin"  # of vLLM's file names
LOCK = "sweep.lock"
ABANDONED_S = 600.0  # age of a temporary file whose writer has died


class FolderLimit:
    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._unswept = limit  # sweeps at the first write
        self._counting = threading.Lock()

    def wrote(self, size: int) -> None:
        """Counts a written file. Sweeps if it is time to. Raises OSError."""
        with self._counting:
            self._unswept += size
            if self._unswept < self._limit // 32:
                return
            self._unswept = 0
        self.sweep()

    def sweep(self) -> None:
        with _alone(self._folder / LOCK) as alone:
            if not alone:
                return
            files, now = [], time.time()
            for path, stat in _files(self._folder):
                if path.suffix == BLOCK:
                    files.append((stat.st_mtime, stat.st_size, path))
                elif path.suffix == TEMPORARY and now - stat.st_mtime > ABANDONED_S:
                    _delete(path)
            total = sum(size for _, size, _ in files)
            if total <= self._limit * 7 // 8:
                return
            for _, size, path in sorted(files):
                _delete(path)
                total -= size
                if total <= self._limit * 3 // 4:
                    return


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with suppress(OSError):
                yield path, path.stat()


def _delete(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
