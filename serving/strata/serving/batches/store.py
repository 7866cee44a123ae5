"""Files and batches on disk, in one folder that all gateways of the endpoint share.

    <folder>/<space>/files/<id>            content
    <folder>/<space>/files/<id>.json       record; a file without one does not exist yet
    <folder>/<space>/batches/<id>.json     record, written by the gateway that runs the batch
    <folder>/<space>/batches/<id>.cancel   a client cancelled it
    <folder>/<space>/batches/<id>.lock     locked by the gateway that runs it
    <folder>/pending/<space>~<id>          the batch has not ended

A tenant has a space of its own. Requests without a tenant share one. All functions block on the disk.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from strata.platform.files import write_atomic
from strata.serving.batches.records import ID, Batch, StoredFile

COMMON = "_"  # space of requests without a tenant; no tenant's name begins with it
PARTIAL = ".upload-"
ABANDONED_S = 3600.0  # age of a partial upload that a killed gateway left behind


class Space:
    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.files, self.batches, self._pending = root / name / "files", root / name / "batches", root / "pending"

    def create(self) -> None:
        for folder in (self.files, self.batches, self._pending):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def file(self, name: str) -> StoredFile | None:
        found = _read(self.files / f"{name}.json") if ID.fullmatch(name) else None
        return None if found is None else StoredFile.load(found)

    def content(self, name: str) -> Path:
        return self.files / name

    def add_file(self, record: StoredFile) -> None:
        """Makes a file visible whose content is complete."""
        write_atomic(self.files / f"{record.id}.json", record.dump())

    def remove_file(self, name: str) -> None:
        (self.files / f"{name}.json").unlink(missing_ok=True)
        self.content(name).unlink(missing_ok=True)

    def file_ids(self) -> list[str]:
        """Ids of all files, the newest first."""
        return _ids(self.files)

    def used_bytes(self) -> int:
        return sum(_size(path) for path in self.files.iterdir())

    def batch(self, name: str) -> Batch | None:
        found = _read(self.batches / f"{name}.json") if ID.fullmatch(name) else None
        return None if found is None else Batch.load(found)

    def add_batch(self, batch: Batch) -> None:
        """Stores a new batch. It is pending first: a kill between the two steps leaves a name without a batch."""
        self.pending_mark(batch.id).touch()
        self.save_batch(batch)

    def save_batch(self, batch: Batch) -> None:
        write_atomic(self.batches / f"{batch.id}.json", batch.dump())

    def end_batch(self, batch: Batch) -> None:
        self.save_batch(batch)
        self.pending_mark(batch.id).unlink(missing_ok=True)

    def batch_ids(self) -> list[str]:
        """Ids of all batches, the newest first."""
        return _ids(self.batches)

    def pending_ids(self) -> list[str]:
        """Ids of this space's batches that have not ended."""
        return [name for space, name in pending(self._pending.parent) if space == self.name]

    def pending_mark(self, name: str) -> Path:
        return self._pending / f"{self.name}~{name}"

    def cancel(self, name: str) -> None:
        self._cancel_mark(name).touch()

    def cancelled_at(self, name: str) -> int | None:
        try:
            return int(self._cancel_mark(name).stat().st_mtime)
        except FileNotFoundError:
            return None

    def _cancel_mark(self, name: str) -> Path:
        return self.batches / f"{name}.cancel"

    def lock_file(self, name: str) -> Path:
        return self.batches / f"{name}.lock"


def pending(root: Path) -> list[tuple[str, str]]:
    """Spaces and ids of the batches that have not ended, the oldest first."""
    names = _names(root / "pending")
    found = [(space, name) for space, _, name in (each.partition("~") for each in names) if ID.fullmatch(name)]
    return sorted(found, key=lambda each: each[1])


def remove_abandoned(root: Path) -> None:
    """Deletes partial uploads and half-written records that killed gateways left behind."""
    for leftover in _hidden(root):
        try:
            if leftover.stat().st_mtime < time.time() - ABANDONED_S:
                leftover.unlink()
        except FileNotFoundError:
            pass


def _hidden(root: Path) -> Iterator[Path]:
    yield from root.glob("*/files/.*")
    yield from root.glob("*/batches/.*")


def _ids(folder: Path) -> list[str]:
    found = [name.removesuffix(".json") for name in _names(folder) if name.endswith(".json") and not name.startswith(".")]
    return sorted(found, reverse=True)


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a partial upload that has just ended
        return 0


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
