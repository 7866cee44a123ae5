"""Files of one KV block each. A reader finds a block whole, or not at all.

A file ends with a checksum over its content and its name. A damaged, shortened or misplaced file is deleted by its first reader,
and the block is computed again. A file gets its name when it is complete, so an engine that is killed in a write leaves a
temporary file only.
"""

import os
import struct
import threading
import zlib
from contextlib import suppress
from pathlib import Path

ENDING = struct.Struct("<8sI")
MARK = b"strataKV"
TEMPORARY = ".tmp"


class Damaged(OSError):
    """The content of a file is not what was written."""


def write(path: Path, content: memoryview) -> int:
    """Returns the bytes written; 0 if the file exists. Raises OSError."""
    if path.exists():
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{TEMPORARY}")
    try:
        with temporary.open("wb", buffering=0) as file:
            _write_all(file.fileno(), content)
            _write_all(file.fileno(), memoryview(ENDING.pack(MARK, _checksum(path, content))))
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    return len(content) + ENDING.size


def read(path: Path, content: memoryview) -> None:
    """Fills `content`. Raises OSError; Damaged after deleting the file."""
    with path.open("rb", buffering=0) as file:
        filled = 0
        while filled < len(content) and (part := file.readinto(content[filled:])):
            filled += part
        ending = file.read(ENDING.size + 1)
    if filled < len(content) or ending != ENDING.pack(MARK, _checksum(path, content)):
        with suppress(OSError):
            path.unlink()
        raise Damaged(f"{path} is damaged, and was deleted")
    with suppress(OSError):
        os.utime(path)  # least recently used files are deleted first


def _checksum(path: Path, content: memoryview) -> int:
    return zlib.crc32(path.name.encode(), zlib.crc32(content))


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
