"""Copies a rank's state to memory in the background, while the next step runs forward and backward.

The optimizer's next step changes the values, so it waits until the copy is complete. A rank that finishes a step has thus
completed its copy of the step before, and all ranks finish a step together. So two files per rank, written in turn, always hold
a step that all ranks have: a lost worker costs at most one finished step.
"""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strata.training.checkpoint.format import Origin
from strata.training.memory_copies.copy_file import CopyFile, checksum
from strata.training.metrics.records import Record
from strata.training.parallel.optimizer_state import Fragment

WAIT_S = 600.0
PORTION = 8 << 20  # values of a transfer, 32 MiB
Send = Callable[[CopyFile], None]


class Copier:
    """Writes the copies of one rank. `older` are files that hold the step from which the run continued: they are removed when all
    ranks have a newer one. `send`, with several nodes, sends a complete copy to another node."""

    def __init__(
        self,
        folder: Path,
        fragments: list[Fragment],
        origin: Origin,
        rank: int,
        ranks: int,
        every: int,
        older: list[Path],
        send: Send | None = None,
    ) -> None:
        self._folder, self._fragments, self._origin, self._rank, self._ranks = folder, fragments, origin, rank, ranks
        self._every, self._older, self._send = every, older, send
        self._files: list[CopyFile] = []
        self._turn = 0
        self._pool = ThreadPoolExecutor(1, "memory-copy")
        self._copied = threading.Event()
        self._copied.set()
        self._running: Future[None] | None = None
        self._next = 0  # the step that runs now or next
        self._blocked = self._seconds = 0.0
        cuda = next((part.values.device for part in fragments if part.values.is_cuda), None)
        self._stream = torch.cuda.Stream(cuda) if cuda else None  # type: ignore[no-untyped-call]
        self.problem: OSError | None = None

    def after_step(self, step: int) -> None:
        """Starts a copy if one is due after `step`. The step's record must have been written: a run continues only from a step in
        its history."""
        begin = time.perf_counter()
        self._next = step + 1
        if step % self._every == 0 and self.problem is None:
            self._finish()
            ready = None
            if self._stream:
                ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ready.record()
            self._copied.clear()
            self._running = self._pool.submit(self._copy, step, ready)
        self._blocked += time.perf_counter() - begin

    def before_update(self, *_: Any) -> None:
        """Waits, before the optimizer changes the values, until they are copied. The copy is also sent by the end of the step
        after which the next one begins."""
        begin = time.perf_counter()
        if not self._copied.wait(WAIT_S):
            raise TimeoutError(f"The copy of step {self._next - 1} to memory did not end within {WAIT_S:.0f} s.")
        if self._next % self._every == 0:
            self._finish()
        self._blocked += time.perf_counter() - begin

    def measure(self, record: Record) -> None:
        """Adds the time for which the step was blocked, and the last copy's own time, to a step's record."""
        record.setdefault("seconds", {})["memory_copy"] = self._blocked
        record["memory_copy_s"] = self._seconds
        self._blocked = 0.0

    def _finish(self) -> None:
        if self._running:
            self._running.result(WAIT_S)
            self._running = None

    def _copy(self, step: int, ready: "torch.cuda.Event | None") -> None:
        begin = time.perf_counter()
        try:
            file = self._next_file()
            file.begin()
            file.finish(step, self._copy_values(file, ready))
            self._turn += 1
            self._copied.set()
            self._send_to_peer(file)
        except OSError as error:  # no space is left, or the run has ended and its folder is gone
            self.problem = error
            print(f"Rank {self._rank} copies its state to memory no more: {error}", file=sys.stderr, flush=True)
        finally:
            self._copied.set()
            self._seconds = time.perf_counter() - begin

    def _send_to_peer(self, file: CopyFile) -> None:
        """Sends a copy. If that fails, copies are only on this node until workers start again, as after the loss of the peer."""
        try:
            if self._send:
                self._send(file)
        except OSError as error:
            self._send = None
            print(f"Rank {self._rank} sends its copies no more: {error}", file=sys.stderr, flush=True)

    def _next_file(self) -> CopyFile:
        if self._turn < 2:
            if self._turn == 1:  # all ranks have completed their first copy
                for path in self._older:
                    path.unlink(missing_ok=True)
            self._files.append(CopyFile(self._folder, self._rank, self._ranks, self._origin, self._fragments))
            if self._stream:
                _pin(self._files[-1])
        return self._files[self._turn % 2]

    def _copy_values(self, file: CopyFile, ready: "torch.cuda.Event | None") -> int:
        """Copies all fragments and returns their checksum. Two calls do the work, each without the interpreter's lock."""
        values = [part.values for part in self._fragments]
        if not self._stream:
            torch._foreach_copy_(file.values, values)
            return checksum(file.words)
        assert ready
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            # Of the source: a transfer error is detected too. 64-bit sums would take four times as long.
            sums = [value.view(torch.int32).sum(dtype=torch.int32) for value in values]
            _transfer(values, file.values)
            return int(torch.stack(sums).sum(dtype=torch.int32).item()) % 2**32  # waits for this stream only


def _transfer(values: list[Tensor], into: list[Tensor]) -> None:
    """Queues transfers to the host, two portions at a time. A GPU serves them in order, so a small read of the step that runs
    meanwhile, such as the number of its targets, would wait behind all that is queued, and the GPU with it."""
    before, queued = None, 0
    for value, target in zip(values, into, strict=True):
        for source, place in zip(torch.split(value, PORTION), torch.split(target, PORTION), strict=True):
            place.copy_(source, non_blocking=True)
            queued += source.numel()
            if queued >= PORTION:
                portion = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                portion.record()
                if before:
                    before.synchronize()
                before, queued = portion, 0


def _pin(file: CopyFile) -> None:
    """Lets the GPU write to the file's pages directly. Without it, copies pass through the driver's own buffer."""
    into = torch.from_numpy(file.words.view(np.int32))
    torch.cuda.cudart().cudaHostRegister(into.data_ptr(), into.nbytes, 0)  # type: ignore[no-untyped-call]
