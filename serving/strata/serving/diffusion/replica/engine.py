"""Engine of a replica: queues pictures, forms batches, and runs them on a group of workers, which it replaces when it is lost.

One batch runs at a time, and the next begins when it ends. The pictures of a lost batch run again with the new group; a picture
under which groups are lost again and again is refused.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from strata.platform.errors import UserError
from strata.serving.api.pictures import Order, PictureModel
from strata.serving.api.requests import ApiError
from strata.serving.diffusion.replica.batching import Queue, Shape, limit
from strata.serving.diffusion.replica.events import partial_steps
from strata.serving.diffusion.replica.messages import Batch, Done, FromWorker, Ready, Refused, Step, Stopped, Unusable, Wanted
from strata.serving.diffusion.replica.worker_group import GroupLost
from strata.serving.metrics.telemetry import Pictures as Telemetry

logger = logging.getLogger("ray.serve")

TRIES = 3  # groups that may be lost under a picture; from the second on it runs alone
LOOK_S = 1.0  # between looks at idle workers
STARTS = 3  # groups in a row that may end before the model is loaded; then Serve replaces the replica


class Workers(Protocol):
    """A `WorkerGroup`."""

    @property
    def lost(self) -> GroupLost | None: ...
    async def next(self) -> FromWorker: ...
    def run(self, batch: Batch) -> None: ...
    def cancel(self, number: int) -> None: ...
    def idle(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class Stepped:
    step: int


@dataclass(frozen=True)
class Partial:
    number: int
    picture: np.ndarray


@dataclass(frozen=True)
class Completed:
    picture: np.ndarray
    text_tokens: int


Event = Stepped | Partial | Completed | ApiError | GroupLost
Send = Callable[[int, Event], None]


@dataclass(eq=False)
class Job:
    """One picture of a request. `send` receives its events, the last a Completed or an error."""

    order: Order
    index: int  # in its request
    shape: Shape
    send: Send
    added: float
    began: float | None = None  # of its first batch
    losses: int = 0  # groups lost while it ran
    previous_step: int = 0  # a picture that runs again repeats no event
    cancelled: bool = field(default=False, repr=False)

    def wanted(self) -> Wanted:
        order = self.order
        size = (order.width, order.height, order.steps)
        return Wanted(order.prompt, order.negative, *size, order.guidance, order.seed + self.index)

    def emit(self, event: Event) -> None:
        if not self.cancelled:
            self.send(self.index, event)


class Engine:
    """`start` returns a new group of workers. Only its event loop may call it."""

    def __init__(
        self,
        start: Callable[[], Awaitable[Workers]],
        telemetry: Telemetry,
        max_batch: int,
        batch_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._telemetry, self._max_batch, self._clock = start, telemetry, max_batch, clock
        self._queue: Queue[Job] = Queue(self._limit, batch_wait_s)
        self._running: list[Job] = []
        self._arrived = asyncio.Event()
        self._workers: Workers | None = None
        self._ready: Ready | None = None
        self._batches = 0
        self._failure: Exception | None = None  # the engine cannot go on
        self._serving: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Starts the workers. Raises UserError if they cannot serve the model."""
        await self._start_workers()
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    @property
    def model(self) -> PictureModel:
        assert self._ready is not None
        return self._ready.model

    @property
    def healthy(self) -> bool:
        return self._failure is None and self._workers is not None

    def load(self) -> dict[str, int]:
        return {"running": len(self._running), "waiting": len(self._queue)}

    def check_health(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"The workers cannot be started: {self._failure}")

    def submit(self, order: Order, index: int, send: Send) -> Job:
        assert self._ready is not None
        guided = self._ready.guides_twice and order.guidance > 1
        job = Job(order, index, Shape(order.width, order.height, order.steps, guided), send, self._clock())
        if self._failure is not None:
            job.emit(GroupLost(str(self._failure)))
            return job
        self._queue.add(job, job.added)
        self._arrived.set()
        self._report_load()
        return job

    def cancel(self, job: Job) -> None:
        """Drops a picture whose client is gone. The running batch ends with its current step if no other picture is in it."""
        job.cancelled = True
        if self._queue.remove(job):
            self._telemetry.ended("cancelled")
            self._report_load()
        elif self._running and all(each.cancelled for each in self._running) and self._workers is not None:
            self._workers.cancel(self._batches)

    async def end(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
        if self._workers is not None:
            await asyncio.to_thread(self._workers.kill)

    def _limit(self, shape: Shape) -> int:
        return limit(shape, self._max_batch, self.model.width * self.model.height)

    def _report_load(self) -> None:
        self._telemetry.load(len(self._running), len(self._queue))

    async def _start_workers(self) -> None:
        """Starts groups until one has loaded the model."""
        for tries in range(1, STARTS + 1):
            workers = await self._start()
            try:
                first = await workers.next()
            except GroupLost as error:
                logger.warning("The workers ended before they had loaded the model: %s.", error)
                if tries == STARTS:
                    raise
                continue
            workers.idle()
            if isinstance(first, Unusable):
                raise UserError(first.cause, first.fix)
            assert isinstance(first, Ready)
            self._workers, self._ready = workers, first
            return

    async def _serve(self) -> None:
        try:
            while True:
                delay = self._queue.delay(self._clock())
                if delay == 0.0:
                    await self._run(self._queue.take())
                    continue
                assert self._workers is not None
                if self._workers.lost is not None:
                    await self._replace([], self._workers.lost)
                self._arrived.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), LOOK_S if delay is None else delay)
        except Exception as error:
            logger.exception("The engine ended.")
            self._failure = error
            for job in (*self._running, *self._queue):
                job.emit(GroupLost(str(error)))  # the gateway tries another replica

    async def _run(self, jobs: list[Job]) -> None:
        assert self._workers is not None
        self._batches += 1
        self._running = jobs
        now = self._clock()
        for job in jobs:
            job.began = now if job.began is None else job.began
        self._telemetry.batch_began(len(jobs))
        self._report_load()
        numbers = {place: _partial_numbers(job.order) for place, job in enumerate(jobs)}
        wanted = {step for steps in numbers.values() for step in steps}
        partials = {step: tuple(place for place, steps in numbers.items() if step in steps) for step in wanted}
        self._workers.run(Batch(self._batches, tuple(job.wanted() for job in jobs), partials))
        try:
            await self._receive(jobs, numbers)
        except GroupLost as error:
            await self._replace(jobs, error)
        finally:
            self._running = []
            self._report_load()

    async def _receive(self, jobs: list[Job], numbers: dict[int, dict[int, int]]) -> None:
        assert self._workers is not None
        while True:
            message = await self._workers.next()
            if isinstance(message, Step):
                self._stepped(jobs, numbers, message)
                continue
            self._workers.idle()
            if isinstance(message, Done):
                for job, picture, tokens in zip(jobs, message.pictures, message.text_tokens, strict=True):
                    self._telemetry.ended("cancelled" if job.cancelled else "completed")
                    job.emit(Completed(picture, tokens))
            elif isinstance(message, Refused):
                self._refused(jobs, message)
            else:
                assert isinstance(message, Stopped)
                self._telemetry.ended("cancelled", len(jobs))
            return

    def _stepped(self, jobs: list[Job], numbers: dict[int, dict[int, int]], message: Step) -> None:
        self._telemetry.stepped(len(jobs), message.seconds)
        for place, job in enumerate(jobs):
            if message.step <= job.previous_step:
                continue
            job.previous_step = message.step
            job.emit(Stepped(message.step))
            if place in message.partials:
                job.emit(Partial(numbers[place][message.step], message.partials[place]))

    def _refused(self, jobs: list[Job], message: Refused) -> None:
        """A batch has one culprit at least; its pictures run alone to find it."""
        if len(jobs) == 1:
            self._telemetry.ended("failed")
            jobs[0].emit(ApiError(400, message.reason))
            return
        self._again([job for job in jobs if not job.cancelled], alone=True)

    async def _replace(self, jobs: list[Job], error: GroupLost) -> None:
        """Starts a new group and puts the pictures of the lost one back."""
        logger.warning("A batch of %d was interrupted: %s. The workers are started again.", len(jobs), error)
        self._telemetry.workers_restarted()
        again = []
        for job in jobs:
            job.losses += 1
            if job.cancelled:
                self._telemetry.ended("cancelled")
            elif job.losses >= TRIES:
                self._telemetry.ended("failed")
                job.emit(ApiError(500, f"The workers ended {TRIES} times while they made this picture."))
            else:
                again.append(job)
        self._again(again, alone=any(job.losses > 1 for job in again))
        self._running, self._workers = [], None
        self._report_load()
        await self._start_workers()

    def _again(self, jobs: list[Job], alone: bool) -> None:
        for number, job in enumerate(jobs):
            if alone:
                job.shape = replace(job.shape, alone=self._batches * self._max_batch + number)
        self._queue.put_back(jobs, self._clock())


def _partial_numbers(order: Order) -> dict[int, int]:
    """Numbers of the partial pictures by the step after which they are sent."""
    return {step: number for number, step in enumerate(partial_steps(order.steps, order.partials))}
