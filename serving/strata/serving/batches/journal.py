"""Append-only file of answers. A line that a kill cut short is removed when the file is opened again."""

import os
from pathlib import Path

import msgspec

READ_BYTES = 2**20


class _Named(msgspec.Struct):
    custom_id: str


class Journal:
    """Blocks on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.ids, self._end = self._recover()

    def _recover(self) -> tuple[set[str], int]:
        """Ids of the complete lines, and the end of the last one, at which the file is cut."""
        ids: set[str] = set()
        end = 0
        with os.fdopen(os.dup(self._file), "rb") as source:
            source.seek(0)
            for line in source:
                try:
                    name = msgspec.json.decode(line, type=_Named).custom_id if line.endswith(b"\n") else None
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    name = None
                if name is None:  # what follows a damaged line is written again
                    break
                ids.add(name)
                end += len(line)
        os.ftruncate(self._file, end)
        return ids, end

    def append(self, custom_id: str, line: bytes) -> None:
        """Adds a line or nothing: raises OSError after removing what was written of it."""
        written = 0
        try:
            while written < len(line):
                written += os.pwrite(self._file, line[written:], self._end + written)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += written
        self.ids.add(custom_id)

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    @property
    def size(self) -> int:
        return self._end
