"""Process that copies a worker's output to the run's folder while the worker runs, and what is left after its end.

A process of its own, because it outlives a worker that is killed and so copies its last lines and the flight recorder's dump, and
because storage that hangs or is full then stops neither the worker nor its exit. Standard library only: it runs without
site-packages.

Standard input is a pipe from the worker; its end of file means that the worker has ended.
"""

import contextlib
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

LEAST_S = 1.0  # between copies
BUSY = 0.05  # share of the time spent in copies: a mounted bucket rewrites the whole file at each append
MOST_S = 60.0
LAST_TRIES_S = 30.0  # after the worker's end, if the storage fails
LIMIT = 2**24  # bytes of a log, after which it becomes the older half, <name>.1, and a new one begins
LONGEST_LINE = 2**16  # a line without an end beyond this is copied in parts
MOST_DUMP = 2**26  # bytes of a flight recorder's dump


@dataclass
class Source:
    """A growing local file, copied up to `offset`."""

    path: Path
    offset: int = 0

    def read(self, ended: bool) -> tuple[bytes, int]:
        """New text, in whole lines unless the writer has ended, and the offset behind it."""
        try:
            with self.path.open("rb") as file:
                return self._read(file, ended)
        except FileNotFoundError:
            return b"", self.offset

    def _read(self, file: BinaryIO, ended: bool) -> tuple[bytes, int]:
        size = os.fstat(file.fileno()).st_size
        begin, note = self.offset if self.offset <= size else 0, b""  # smaller: it was truncated
        if size - begin > LIMIT:
            left_out = size - LIMIT - begin
            note = f"[strata] {left_out} bytes are left out: {self.path.name} grew faster than it was copied\n".encode()
            begin = size - LIMIT
        file.seek(begin)
        text = file.read(size - begin)
        if ended:
            line_end = b"\n" if text and not text.endswith(b"\n") else b""
            return note + text + line_end, begin + len(text)
        whole = text.rfind(b"\n") + 1
        text = text[:whole] if whole or len(text) < LONGEST_LINE else text
        return (note + text if text else b""), begin + len(text)


class Log:
    """Log of a rank, in the first of several folders that exists: the run's, or the one that its logs were moved to."""

    def __init__(self, places: Sequence[Path], rank: int) -> None:
        self._places, self._rank = places, rank

    def _folder(self) -> Path:
        for place in self._places:
            if place.is_dir():
                return place
        raise FileNotFoundError(self._places[0])

    def append(self, text: bytes) -> None:
        """Appends all of the text, or raises and leaves the file as it was."""
        path = self._folder() / f"rank-{self._rank}.log"
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size + len(text) > LIMIT:
                path.replace(path.with_name(path.name + ".1"))
        with path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                rest = memoryview(text)
                while rest:  # a nearly full disk accepts what fits and fails at the next write
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(before)
                raise

    def write_dump(self, data: bytes) -> None:
        folder = self._folder()
        partial = folder / f".flight-{self._rank}"
        try:
            partial.write_bytes(data)
            partial.replace(folder / f"flight-{self._rank}")
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


class Shipper:
    def __init__(self, log: Log, sources: Sequence[Path], flight: Path, title: str) -> None:
        self._log, self._sources, self._flight = log, [Source(path) for path in sources], flight
        self._title: str | None = title
        self._dumped: tuple[int, int] | None = None
        self._ended = False

    def copy(self, ended: bool) -> None:
        """Copies what is new. After an error nothing counts as copied, and the next call repeats it."""
        texts = [source.read(ended) for source in self._sources]
        text = b"".join(part for part, _ in texts)
        if self._title:
            text = f"[strata] {self._title}, {_now()}\n".encode() + text
        if ended and not self._ended:
            text += f"[strata] the process has ended, {_now()}\n".encode()
        if text:
            self._log.append(text)
        self._title, self._ended = None, ended
        for source, (_, offset) in zip(self._sources, texts, strict=True):
            source.offset = offset
        self._copy_dump(ended)

    def _copy_dump(self, ended: bool) -> None:
        try:
            found = self._flight.stat()
        except FileNotFoundError:
            return
        version = (found.st_size, found.st_mtime_ns)
        finished = ended or time.time() - found.st_mtime > LEAST_S  # torch writes it in several parts
        if version != self._dumped and finished and found.st_size <= MOST_DUMP:
            self._log.write_dump(self._flight.read_bytes())
            self._dumped = version


def follow(shipper: Shipper, worker: int) -> None:
    """Copies until the pipe `worker` reports the worker's end."""
    wait = 0.0
    while not select.select([worker], [], [], wait)[0]:
        begin = time.monotonic()
        with contextlib.suppress(OSError):  # full or unreachable storage: the next round tries again
            shipper.copy(ended=False)
        wait = min(MOST_S, max(LEAST_S, (time.monotonic() - begin) / BUSY))
    deadline = time.monotonic() + LAST_TRIES_S
    while True:
        try:
            return shipper.copy(ended=True)
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(LEAST_S)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def main() -> None:
    order = json.loads(sys.argv[1])
    if os.fork():  # not a child of the worker, whose children Ray kills with it
        os._exit(0)
    log = Log([Path(place) for place in order["places"]], order["rank"])
    shipper = Shipper(log, [Path(path) for path in order["sources"]], Path(order["flight"]), order["title"])
    follow(shipper, sys.stdin.fileno())
    shutil.rmtree(order["scratch"], ignore_errors=True)


if __name__ == "__main__":
    main()
