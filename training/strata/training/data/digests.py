"""Content digests of files, cached by path, size and timestamps, so that unchanged files are not read again.

A cached digest is valid because every write changes a file's ctime, which a program cannot set back. File system clocks tick
every few milliseconds, some every two seconds, so the digest of a file that changed within the last seconds is not cached: a
later change within the same tick would go unnoticed. Inodes are not compared: buckets mounted as folders renumber their files
at each mount.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.training.data.left_out import shown

SETTLED_S = 3.0
THREADS = 4


@dataclass(frozen=True)
class Stamp:
    size: int
    mtime_ns: int
    ctime_ns: int


class Files:
    """Files with their timestamps at construction."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._stamps = [_stamp(path) for path in paths]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(stamp.size for stamp in self._stamps)

    def digest(self, salt: str = "") -> str:
        """Digest of names and contents, from the cache or by reading all files."""
        record = self._record(salt)
        if record.is_file():
            return record.read_text()
        begin = time.time_ns()
        digest = hashlib.blake2b(salt.encode(), digest_size=16)
        with ThreadPoolExecutor(THREADS) as pool:
            for path, content in zip(self.paths, pool.map(_content, self.paths), strict=True):
                digest.update(os.fsencode(path.name))
                digest.update(content)
        self.require_unchanged()
        newest = max((max(stamp.mtime_ns, stamp.ctime_ns) for stamp in self._stamps), default=0)
        if newest < begin - SETTLED_S * 1e9:
            self.remember(digest.hexdigest(), salt)
        return digest.hexdigest()

    def remember(self, digest: str, salt: str = "") -> None:
        """Caches the digest of files with known content, such as files that this process has written."""
        with writable(self._record(salt)) as record:
            write_atomic(record, digest)

    def require_unchanged(self) -> None:
        for path, before in zip(self.paths, self._stamps, strict=True):
            if _stamp(path) != before:
                fix = "Start again when no other process writes to it."
                raise UserError(f"{shown(path)} changed while it was being read.", fix)

    def _record(self, salt: str) -> Path:
        stamped = zip(self.paths, self._stamps, strict=True)
        state = [salt, *([os.fsencode(path.absolute()).hex(), *astuple(stamp)] for path, stamp in stamped)]
        name = hashlib.blake2b(json.dumps(state).encode(), digest_size=16).hexdigest()
        return cache_dir() / "digests" / name


@contextmanager
def writable(path: Path) -> Iterator[Path]:
    """Reports failed writes to the cache (full disk, read-only folder) as a UserError."""
    try:
        yield path
    except OSError as error:
        fix = "Free disk space or make the folder writable, or set STRATA_HOME to another folder."
        raise UserError(f"{shown(path)} cannot be written: {error.strerror or error}.", fix) from None


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").digest()
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{shown(path)} cannot be read: {error.strerror or error}.", "Restore the file, or remove it from data.path."
    )
