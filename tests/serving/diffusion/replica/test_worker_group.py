"""Loss of workers: ends of processes, silence, and messages before the end. Processes are stand-ins."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from strata.serving.diffusion.replica import worker_group
from strata.serving.diffusion.replica.messages import Batch, Cancel, Stopped
from strata.serving.diffusion.replica.worker_group import GroupLost, WorkerGroup


class Process:
    """Its sentinel is readable once it has ended."""

    def __init__(self) -> None:
        self.sentinel, self._end = os.pipe()
        self.exitcode: int | None = None

    def end(self, code: int) -> None:
        if self.exitcode is None:
            self.exitcode = code
            os.close(self._end)

    def kill(self) -> None:
        self.end(-9)

    def join(self, timeout: float | None = None) -> None:
        pass


class Group:
    def __init__(self, start_s: float, step_s: float) -> None:
        pairs = [Pipe(), Pipe()]
        self.theirs: list[Connection] = [there for _, there in pairs]
        self.processes = [Process(), Process()]
        self.cleaned: list[bool] = []
        here = [here for here, _ in pairs]
        loop = asyncio.get_running_loop()
        self.group = WorkerGroup(self.processes, here, start_s, step_s, loop, lambda: self.cleaned.append(True))


def run(test: Callable[[Group], Awaitable[None]], start_s: float = 10.0, step_s: float = 10.0) -> None:
    async def inside() -> None:
        made = Group(start_s, step_s)
        try:
            await asyncio.wait_for(test(made), 10)
        finally:
            made.processes[0].end(0)

    asyncio.run(inside())


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "LOOK_S", 0.01)


@pytest.mark.parametrize(
    ("rank", "code", "reason"),
    [
        (0, -9, "worker 0 was killed by signal 9"),
        (1, -11, "worker 1 was killed by signal 11"),
        (1, 1, "worker 1 ended with code 1"),
    ],
)
def test_end_of_one_worker_ends_all(rank: int, code: int, reason: str) -> None:
    async def test(made: Group) -> None:
        assert made.group.lost is None
        made.processes[rank].end(code)
        for _ in range(2):  # every later call too
            with pytest.raises(GroupLost, match=reason):
                await made.group.next()
        assert all(process.exitcode is not None for process in made.processes) and made.cleaned == [True]
        assert str(made.group.lost) == reason

    run(test)


def test_messages_before_the_end_are_received() -> None:
    async def test(made: Group) -> None:
        made.theirs[0].send(Stopped())
        made.theirs[0].send(Stopped())
        made.processes[0].end(0)
        assert [await made.group.next(), await made.group.next()] == [Stopped(), Stopped()]
        made.theirs[0].close()
        with pytest.raises(GroupLost):
            await made.group.next()

    run(test)


def test_batches_go_to_all_workers_and_cancellations_to_the_first() -> None:
    async def test(made: Group) -> None:
        batch = Batch(3, (), {})
        made.group.run(batch)
        made.group.cancel(3)
        assert [made.theirs[0].recv(), made.theirs[0].recv(), made.theirs[1].recv()] == [batch, Cancel(3), batch]
        assert not made.theirs[1].poll()

    run(test)


def test_silent_start_is_a_loss() -> None:
    async def test(made: Group) -> None:
        with pytest.raises(GroupLost, match="did not answer in time"):
            await made.group.next()

    run(test, start_s=0.05)


def test_limit_is_that_of_a_step_and_idle_workers_may_be_silent() -> None:
    async def test(made: Group) -> None:
        made.group.idle()
        await asyncio.sleep(1.2)
        assert made.group.lost is None
        made.group.run(Batch(1, (), {}))
        began = time.monotonic()
        for _ in range(4):  # together longer than one step may take
            await asyncio.sleep(0.3)
            made.theirs[0].send(Stopped())
            await made.group.next()
        assert made.group.lost is None
        with pytest.raises(GroupLost, match="did not answer in time"):
            await made.group.next()
        assert time.monotonic() - began > 4 * 0.3 + 0.9

    run(test, step_s=1.0)
