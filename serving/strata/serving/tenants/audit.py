"""Audit log: one JSON line per request, without prompts and keys.

Lines are written by a thread, so that a slow disk delays no stream. Each gateway has its own file, rotated by size. Files of
gateways that were replaced stay, so a new gateway deletes the oldest ones of the folder.
"""

import json
import logging
import os
import queue
from collections.abc import Mapping
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger("ray.serve")

FILE_BYTES = 64 * 2**20
FILES = 8  # old files beside the current one
IN_FOLDER = 64  # files of all gateways, those of the new one not included
UNWRITTEN = 100_000  # lines that may wait for the disk; further ones are lost, and their number is logged


class _File(RotatingFileHandler):
    def _open(self) -> IO[Any]:  # type: ignore[override]
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))

    def handleError(self, record: logging.LogRecord) -> None:
        logger.exception("The audit log %s cannot be written.", self.baseFilename)


class _Queue(QueueHandler):
    lost = 0

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.lost:
            logger.error("The audit log is written too slowly: lines are lost.")
        self.lost += 1


class AuditLog:
    def __init__(self, folder: Path, name: str, file_bytes: int = FILE_BYTES, files: int = FILES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(folder.glob("audit-*.jsonl*"), key=_changed, reverse=True)
        for old in found[IN_FOLDER:]:
            old.unlink(missing_ok=True)  # another gateway may have deleted it
        self._lines = _Queue(queue.Queue(UNWRITTEN))
        self._listener = QueueListener(
            self._lines.queue, _File(folder / f"audit-{name}.jsonl", maxBytes=file_bytes, backupCount=files)
        )
        self._listener.start()

    def write(self, entry: Mapping[str, Any]) -> None:
        self._lines.handle(logging.makeLogRecord({"msg": json.dumps(entry)}))

    @property
    def lost(self) -> int:
        return self._lines.lost

    def close(self) -> None:
        """Writes what is left."""
        self._listener.stop()
        for handler in self._listener.handlers:
            handler.close()


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
