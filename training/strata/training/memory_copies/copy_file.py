"""File with a copy of one rank's state after one step.

The file has a fixed header, a table of its fragments and their values. The header has no step while values are written, so a
kill in the middle leaves a file that is recognized as incomplete.
"""

import mmap
import os
import struct
import uuid
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strata.training.checkpoint.format import Manifest, Origin, Stored
from strata.training.parallel.optimizer_state import Fragment

MAGIC = b"strata-1"
# Magic, step, rank, bytes of the table, offset and bytes of the values, their checksum; then a CRC of header and table.
HEADER = struct.Struct("<8sqIQQQI")
CRC = struct.Struct("<I")
TABLE_AT = 64
PAGE = 4096
NO_STEP = -1
READ_BYTES = 16 << 20
Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Copy:
    """Complete copy of a rank's state. `manifest.file` is the name of its file."""

    rank: int
    manifest: Manifest
    checksum: int

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def ranks(self) -> int:
        return self.manifest.ranks


class CopyFile:
    """File that this process writes. `values` are views of it, one for each fragment."""

    def __init__(self, folder: Path, rank: int, ranks: int, origin: Origin, fragments: list[Fragment]) -> None:
        self.path = folder / f"rank-{rank:05}-{uuid.uuid4().hex[:12]}"
        self._rank = rank
        begin, stored = 0, []
        for part in fragments:
            assert part.values.dtype == torch.float32
            shard, count = part.shard, part.values.numel()
            stored.append(Stored(shard.name, part.kind, shard.shape, shard.cut, part.start, count, begin))
            begin += 4 * count
        self._bytes = begin
        self._table = Manifest(NO_STEP, origin, ranks, self.path.name, begin, "", tuple(stored)).dump()
        self._at = -(-(TABLE_AT + len(self._table)) // PAGE) * PAGE
        self._map = self._allocated(self._at + begin)
        self._map[TABLE_AT : TABLE_AT + len(self._table)] = self._table
        self.words: Words = np.frombuffer(self._map, np.uint32, offset=self._at)
        whole = torch.from_numpy(self.words.view(np.float32))
        self.values: list[Tensor] = list(torch.split(whole, [part.values.numel() for part in fragments]))

    def _allocated(self, size: int) -> mmap.mmap:
        """Mapping of a new file with all pages allocated: tmpfs that is full fails here, and not with a signal at a write."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            return mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def data(self) -> NDArray[np.uint8]:
        """The whole file, to send it to another node."""
        return np.frombuffer(self._map, np.uint8)

    def begin(self) -> None:
        """Marks the file as incomplete until `finish`."""
        self._write_header(NO_STEP, 0)

    def finish(self, step: int, checksum: int) -> None:
        self._write_header(step, checksum)

    def _write_header(self, step: int, checksum: int) -> None:
        header = HEADER.pack(MAGIC, step, self._rank, len(self._table), self._at, self._bytes, checksum)
        self._map[: HEADER.size + CRC.size] = header + CRC.pack(zlib.crc32(self._table, zlib.crc32(header)))


def checksum(words: Words) -> int:
    """Sum of 32-bit words, modulo 2**32. Costs a quarter of a CRC, and a GPU can compute it."""
    return int(np.add.reduce(words, dtype=np.uint32))


def examine(path: Path) -> Copy | None:
    """Complete copy in a file. None if it is incomplete, truncated, removed or no copy. Does not read the values."""
    try:
        with path.open("rb") as file:
            start = file.read(TABLE_AT)
            magic, step, rank, table_bytes, at, count, sum_of_words = HEADER.unpack_from(start)
            if magic != MAGIC or step == NO_STEP or os.fstat(file.fileno()).st_size != at + count:
                return None
            table = file.read(table_bytes)
            if zlib.crc32(table, zlib.crc32(start[: HEADER.size])) != CRC.unpack_from(start, HEADER.size)[0]:
                return None
    except (OSError, struct.error):
        return None
    manifest = Manifest.parse(table)
    stored = tuple(replace(one, at=at + one.at) for one in manifest.stored)
    return Copy(rank, replace(manifest, step=step, file=path.name, stored=stored), sum_of_words)


def is_intact(path: Path, copy: Copy) -> bool:
    """Compares the values with their checksum."""
    found = 0
    try:
        with path.open("rb") as file:
            file.seek(-copy.manifest.size, os.SEEK_END)
            while data := file.read(READ_BYTES):
                found += checksum(np.frombuffer(data, np.uint32))
    except (OSError, ValueError):
        return False
    return found % 2**32 == copy.checksum
