"""Group of a replica's workers, from their start to the loss of one of them. A lost group is replaced, never mended.

Workers are forked from a server process that has imported torch and diffusers: a new group takes the time to load the model.
"""

import asyncio
import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from strata.serving.diffusion.replica.messages import Batch, Cancel, FromWorker
from strata.serving.diffusion.replica.spec import PicturesSpec

LOOK_S = 0.5
STOP_S = 2.0
FOLDER = "STRATA_PICTURE_MODEL"  # read by the preloaded module
PRELOAD = "strata.serving.diffusion.replica.preload"


class GroupLost(Exception):
    """A worker ended, or a step took too long."""


class Process(Protocol):
    """Part of multiprocessing's process."""

    @property
    def sentinel(self) -> int: ...
    @property
    def exitcode(self) -> int | None: ...
    def kill(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...


def start(spec: PicturesSpec, start_s: float, loop: asyncio.AbstractEventLoop) -> "WorkerGroup":
    """Starts the processes, which may take seconds: call it in a thread. `start_s`: limit until the model is loaded."""
    context: Any = multiprocessing.get_context("forkserver")
    os.environ[FOLDER] = spec.folder
    context.set_forkserver_preload([PRELOAD, "ray"])  # a forked process imports Ray's main module again
    folder = tempfile.TemporaryDirectory(prefix="strata-pictures-")
    pipes, processes = [], []
    for rank in range(spec.layout.workers):
        here, there = context.Pipe()
        arguments = (rank, spec, str(Path(folder.name) / "meeting"), there)
        process = context.Process(target=_run, args=arguments, name=f"worker-{rank}", daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    return WorkerGroup(processes, pipes, start_s, float(spec.section.step_timeout_s), loop, folder.cleanup)


def _run(rank: int, spec: PicturesSpec, meeting: str, replica: Connection) -> None:
    """Target of a worker's process. Imports torch there only."""
    from strata.serving.diffusion.replica import worker

    worker.main(rank, spec, meeting, replica)


class WorkerGroup:
    """`pipes` lead to the workers, that of worker 0 first. `step_s`: longest time between two messages about a batch."""

    def __init__(
        self,
        processes: Sequence[Process],
        pipes: Sequence[Connection],
        start_s: float,
        step_s: float,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._processes, self._pipes, self._step_s, self._loop, self._ended = processes, pipes, step_s, loop, ended
        self._messages: asyncio.Queue[FromWorker | GroupLost] = asyncio.Queue()
        self._due: float | None = time.monotonic() + start_s  # of the next message; None while the workers are idle
        self.lost: GroupLost | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    async def next(self) -> FromWorker:
        """The next message of worker 0. Raises GroupLost."""
        message = await self._messages.get()
        if isinstance(message, GroupLost):
            self._messages.put_nowait(message)  # for every later call
            raise message
        return message

    def run(self, batch: Batch) -> None:
        self._due = time.monotonic() + self._step_s
        self._send(batch, self._pipes)

    def cancel(self, number: int) -> None:
        self._send(Cancel(number), self._pipes[:1])

    def idle(self) -> None:
        """No message is expected until the next batch."""
        self._due = None

    def _send(self, message: Batch | Cancel, pipes: Sequence[Connection]) -> None:
        with contextlib.suppress(OSError):  # a lost worker is reported by `_watch`
            for pipe in pipes:
                pipe.send(message)

    def _watch(self) -> None:
        """Runs in a thread: passes on worker 0's messages until a worker is lost, then ends the others."""
        lost = GroupLost(self._until_lost())
        self.kill()
        self.lost = lost
        self._put(lost)

    def _until_lost(self) -> str:
        ends = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        leader = self._pipes[0]
        while True:
            found = wait([leader, *ends], timeout=LOOK_S)
            if leader in found:
                try:
                    message = leader.recv()
                except (EOFError, OSError):
                    return self._end_of(0)
                if self._due is not None:
                    self._due = time.monotonic() + self._step_s
                self._put(message)
            elif found:
                return self._end_of(next(rank for sentinel, rank in ends.items() if sentinel in found))
            elif (due := self._due) is not None and time.monotonic() > due:
                return "the workers did not answer in time"

    def _end_of(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(STOP_S)
        code = process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return f"worker {rank} {how}"

    def _put(self, message: FromWorker | GroupLost) -> None:
        with contextlib.suppress(RuntimeError):  # the replica's event loop has ended
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(STOP_S)
        self._ended()
