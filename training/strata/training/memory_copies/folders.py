"""Folders of memory copies: one per run on each node, on tmpfs, locked by a process that lives as long as the run.

The kernel releases a lock when its process ends, however it ends. So a folder without a lock belongs to a dead run: the next
start of any run on the node removes it, unless it continues that run.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = "STRATA_MEMORY_FOLDER"  # for containers whose /dev/shm is small and that have another tmpfs
GUARD = "guard"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def root() -> Path | None:
    """Folder of all copies of this user, None on a system without tmpfs."""
    if chosen := os.environ.get(ROOT):
        return Path(chosen)
    shared = Path("/dev/shm")
    return shared / f"strata-copies-{os.getuid()}" if shared.is_dir() else None


def folder(run: str) -> Path | None:
    """Folder for the copies of the run with this id, None if no process of the run owns one on this node."""
    base = root()
    return base / run if base and run and (base / run).is_dir() else None


def discard(run: str) -> None:
    """Removes the copies of a run on this node, of which none can be trusted. Their folder stays for new ones."""
    found = folder(run)
    for path in [*found.glob("rank-*"), *found.glob("incoming-*")] if found else []:
        path.unlink(missing_ok=True)


def spare_records(run: str) -> Path | None:
    """File for records that rank 0 has not yet written to the run's history."""
    found = folder(run)
    return found / "records.jsonl" if found else None


def identity(path: Path) -> str:
    """Equal for two processes if they see the same folder: they are on the same node."""
    found = path.stat()
    return f"{BOOT_ID.read_text().strip()}-{found.st_dev}-{found.st_ino}"


class Ownership:
    """Ownership of a folder, which is removed at its end unless it is left to a later owner."""

    def __init__(self) -> None:
        self.left = False

    def leave(self) -> None:
        self.left = True


@contextmanager
def owned(run: str) -> Iterator[Ownership]:
    """Owns the folder of a run, and removes it at the end. Finds the copies of the same run's killed driver in it. Removes the
    folders of other dead runs. A folder that another process of this run owns is left to that process."""
    base, ownership = root(), Ownership()
    if base is None or not run:
        yield ownership
        return
    lock = _claimed(base, run)
    try:
        yield ownership
    finally:
        if lock is not None:
            if not ownership.left:
                shutil.rmtree(base / run, ignore_errors=True)
            os.close(lock)


def _claimed(base: Path, run: str) -> int | None:
    """Lock on the run's folder as a file descriptor, None if another process has it."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    guard = os.open(base / GUARD, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)  # a new folder has no lock yet: no other process may take it for a dead run's
        for path in base.iterdir():
            if path.name not in (run, GUARD) and (lock := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
        (base / run).mkdir(mode=0o700, exist_ok=True)
        return _locked(base / run)
    finally:
        os.close(guard)


def _locked(path: Path) -> int | None:
    try:
        found = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(found)
        return None
    return found
