"""Reads the logs of a run, and follows them while it runs."""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from strata.platform import runs
from strata.platform.errors import UserError
from strata.platform.runs import Run
from strata.training.logs import attempts

LOG = re.compile(r"rank-(\d+)\.log")
DUMP = re.compile(r"flight-(\d+)")
CHUNK = 2**20
POLL_S = 0.5


@dataclass
class Tail:
    """Log of one rank from its beginning on, across a change to a new file."""

    path: Path
    _older: bool = True  # the older half, <name>.1, is still to be read
    _offset: int = 0
    _file: tuple[int, int] | None = None  # device and inode of the file that the offset belongs to

    def new(self) -> Iterator[bytes]:
        older = self.path.with_name(self.path.name + ".1")
        if self._older or (self._file and _identity(older) == self._file):  # the second: renamed since the last call
            yield from self._read(older, self._offset)
            self._older, self._file, self._offset = False, None, 0
        yield from self._read(self.path, self._offset)

    def _read(self, path: Path, offset: int) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                self._file = found.st_dev, found.st_ino
                self._offset = offset if offset <= found.st_size else 0  # smaller: another file of that name
                file.seek(self._offset)
                while chunk := file.read(CHUNK):
                    self._offset += len(chunk)
                    yield chunk
        except FileNotFoundError:
            return


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@dataclass
class Lines:
    """Whole lines of a rank, each with a prefix."""

    tail: Tail
    prefix: bytes = b""
    _rest: bytearray = field(default_factory=bytearray)

    def new(self) -> Iterator[bytes]:
        for chunk in self.tail.new():
            self._rest += chunk
            *whole, rest = self._rest.split(b"\n")
            self._rest = bytearray(rest)
            yield from (self.prefix + bytes(line) + b"\n" for line in whole)

    def last(self) -> Iterator[bytes]:
        """The rest without a line end."""
        if self._rest:
            yield self.prefix + bytes(self._rest) + b"\n"
            self._rest.clear()


@dataclass(frozen=True)
class Selection:
    """Logs to show: the run's, of one attempt or the newest, of one rank or all."""

    name: str
    attempt: int | None = None
    rank: int | None = None

    def logs(self) -> Path:
        run = Run(runs.runs_dir() / self.name)
        if not runs.exists(self.name) and runs.NAME.fullmatch(self.name) and attempts.set_aside_folder(run).is_dir():
            return attempts.set_aside_folder(run)
        return attempts.folder(runs.find(self.name))

    def found(self) -> tuple[int, Path]:
        """Number and folder of the attempt."""
        known = attempts.every(self.logs())
        if not known:
            fix = "Runs of older versions have none; of a new run, wait until its workers start."
            raise UserError(f"Run '{self.name}' has no logs.", fix)
        number = max(known) if self.attempt is None else self.attempt
        if number not in known:
            raise UserError(f"Run '{self.name}' has no logs of attempt {number}.", f"Attempts: {_listed(known)}.")
        return number, known[number]

    def ranks(self, number: int, folder: Path) -> list[int]:
        known = _numbered(folder, LOG)
        if not known:
            raise UserError(
                f"The workers of attempt {number} of run '{self.name}' have written nothing.", "Wait for them: --follow"
            )
        if self.rank is not None and self.rank not in known:
            raise UserError(f"Attempt {number} of run '{self.name}' has no log of rank {self.rank}.", f"Ranks: {_listed(known)}.")
        return sorted(known) if self.rank is None else [self.rank]

    def dumps(self, folder: Path) -> list[Path]:
        return [path for rank, path in sorted(_numbered(folder, DUMP).items()) if self.rank in (None, rank)]


def lines(selection: Selection, follow: bool = False, sleep: Callable[[float], None] = time.sleep) -> Iterator[bytes]:
    """Lines of the selected logs, with the rank before each if there are several. With `follow`, until the run has ended, across
    attempts unless one is selected."""
    number, folder = selection.found()
    ranks: dict[int, Lines] = {}
    while True:
        # Asked before the read, so that what was written before the end is read.
        running = follow and _running(selection.name)
        if not (running and _expected(selection)):
            selection.ranks(number, folder)
        for rank in _present(selection, folder):
            ranks.setdefault(rank, Lines(Tail(folder / f"rank-{rank}.log")))
        for rank, log in ranks.items():
            log.prefix = f"[{rank}] ".encode() if len(ranks) > 1 else b""
            yield from log.new()
        newest = selection.found()
        if newest[0] != number or not running:
            for log in ranks.values():
                yield from log.last()
        if newest[0] != number:
            number, folder = newest
            ranks = {}
            yield f"[strata] attempt {number}\n".encode()
        elif not running:
            return
        else:
            sleep(POLL_S)


def _present(selection: Selection, folder: Path) -> list[int]:
    return [rank for rank in sorted(_numbered(folder, LOG)) if selection.rank in (None, rank)]


def _expected(selection: Selection) -> bool:
    """True if workers of the selected ranks may still appear: a run that is starting has no logs of them yet."""
    try:
        workers = runs.find(selection.name).recipe().parallel.workers
    except (UserError, OSError):
        return False
    return selection.rank is None or selection.rank < workers


def _running(name: str) -> bool:
    try:
        return runs.find(name).state().observed_status().startswith("running")
    except UserError:  # deleted, or without a state
        return False


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    try:
        found = [(pattern.fullmatch(path.name), path) for path in folder.iterdir()]
    except FileNotFoundError:
        return {}
    return {int(match[1]): path for match, path in found if match}


def _listed(numbers: dict[int, Path]) -> str:
    """Numbers as ranges, such as 0 to 7, 9."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ranges)
