"""Runs one batch: checks its input, answers its lines in idle slots, and writes its output.

Everything that outlives a kill is on disk. A gateway that takes a batch over checks the input again, skips the lines that the
output and error files have, and continues.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from strata.serving.batches import lines
from strata.serving.batches.in_process import Answered
from strata.serving.batches.journal import Journal
from strata.serving.batches.lines import Line
from strata.serving.batches.meter import Ending, Meter
from strata.serving.batches.records import Batch, Counts, Status, StoredFile
from strata.serving.batches.slots import Slots
from strata.serving.batches.store import Space

logger = logging.getLogger("ray.serve")

AT_ONCE = 256  # lines of one batch that run or wait for a slot
LOOK_S = 0.5  # until a cancellation is seen, and between two records of the progress
DISK_S = 5.0  # between two writes to a disk that is full
TRIES = 5
FAILURES = (408, 500, 502, 504)  # tried again TRIES times
OUTAGE_S = 1800.0  # for which a 503 is tried again
LONGEST_PAUSE_S = 60.0

Ask = Callable[[str, bytes, str], Awaitable[Answered]]  # path, body, request id
Outcome = Literal["completed", "cancelled", "expired"]


class Runner:
    def __init__(
        self, space: Space, batch: Batch, ask: Ask, slots: Slots, meter: Meter, wall: Callable[[], float] = time.time
    ) -> None:
        self._space, self._batch, self._ask, self._slots, self._meter, self._wall = space, batch, ask, slots, meter, wall
        self._input = space.content(batch.input_file_id)
        self._next = asyncio.Lock()  # one line of a batch waits for a slot at a time, so that batches take turns
        self._paused_until = 0.0
        self._writes: set[asyncio.Future[None]] = set()
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Returns when the batch has ended. If cancelled, leaves it to the next gateway."""
        try:
            checked = await asyncio.to_thread(lines.check, self._input, self._batch.endpoint)
        except FileNotFoundError:
            missing = {"code": "file_not_found", "message": "The input file was deleted.", "param": "input_file_id", "line": None}
            checked = lines.Checked((), (missing,))
        if checked.errors:
            await self._end("failed", errors=checked.errors)
            return
        if self._batch.status == "validating":
            await self._save("in_progress", counts=Counts(len(checked.lines)))
        self._output = await asyncio.to_thread(Journal, self._space.content(self._batch.output_id))
        self._errors = await asyncio.to_thread(Journal, self._space.content(self._batch.errors_id))
        try:
            outcome = await self._answer_all(checked.lines)
            if outcome == "expired":
                await self._expire(self._left(checked.lines))
            await self._finalize(outcome)
        finally:
            if self._writes:
                await asyncio.wait(self._writes)
            self._output.close()
            self._errors.close()

    def _left(self, every: Sequence[Line]) -> list[Line]:
        done = self._output.ids | self._errors.ids
        return [line for line in every if line.custom_id not in done]

    async def _answer_all(self, every: Sequence[Line]) -> Outcome:
        left = self._left(every)
        if not left:
            return "completed"
        working = asyncio.ensure_future(self._work(left))
        interrupted = asyncio.ensure_future(self._interrupted())
        try:
            await asyncio.wait({working, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return interrupted.result()
            working.result()
            return "completed"
        finally:
            for task in (working, interrupted):
                task.cancel()
            await asyncio.wait({working, interrupted})
            if self._writes:
                await asyncio.wait(self._writes)

    async def _work(self, left: list[Line]) -> None:
        waiting = iter(left)
        with self._meter.waiting(len(left)) as ended:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(left), AT_ONCE)):
                    group.create_task(self._work_through(waiting, ended))

    async def _work_through(self, waiting: Iterator[Line], ended: Callable[[Ending], None]) -> None:
        for line in waiting:
            request = uuid.uuid4().hex
            answered = await self._answer(line, request)
            journal = self._output if answered.status == 200 else self._errors
            await self._append(journal, line.custom_id, lines.output(request, line.custom_id, answered.status, answered.body))
            ended("completed" if answered.status == 200 else "failed")

    async def _answer(self, line: Line, request: str) -> Answered:
        began = time.monotonic()
        for tries in itertools.count(1):
            async with self._next:
                await asyncio.sleep(max(0.0, self._paused_until - time.monotonic()))
                await self._slots.acquire(line.sequences)
            try:
                body = await asyncio.to_thread(lines.body, self._input, line)
                with self._meter.running():
                    answered = await self._ask(self._batch.endpoint, body, request)
            finally:
                self._slots.release(line.sequences)
            if answered.status == 429 and answered.retry_after is not None:
                # The tenant's limits or the gateway's: the other lines would be refused too.
                self._paused_until = time.monotonic() + min(answered.retry_after, LONGEST_PAUSE_S)
            elif answered.status in FAILURES and tries < TRIES:
                await asyncio.sleep(min(2.0**tries, LONGEST_PAUSE_S))
            elif answered.status == 503 and time.monotonic() < began + OUTAGE_S:
                await asyncio.sleep(min(answered.retry_after or 1.0, LONGEST_PAUSE_S))
            else:
                return answered
        raise AssertionError

    async def _interrupted(self) -> Outcome:
        """Returns the reason to stop. Records the progress meanwhile."""
        while True:
            if await asyncio.to_thread(self._space.cancelled_at, self._batch.id) is not None:
                return "cancelled"
            if self._wall() >= self._batch.expires_at:
                return "expired"
            if self._counts() != self._batch.counts:
                await self._save(self._batch.status, counts=self._counts())
            await asyncio.sleep(LOOK_S)

    def _counts(self) -> Counts:
        return replace(self._batch.counts, completed=len(self._output.ids), failed=len(self._errors.ids))

    async def _expire(self, left: Sequence[Line]) -> None:
        message = f"The request did not run within the completion window of {self._batch.completion_window}."
        with self._meter.waiting(len(left)) as ended:
            for line in left:
                content = lines.unanswered(uuid.uuid4().hex, line.custom_id, "batch_expired", message)
                await self._append(self._errors, line.custom_id, content)
                ended("expired")

    async def _finalize(self, outcome: Outcome) -> None:
        if outcome == "completed":
            await self._save("finalizing", counts=self._counts())
        found: dict[str, Any] = {}
        for key, name, journal in (
            ("output_file_id", self._batch.output_id, self._output),
            ("error_file_id", self._batch.errors_id, self._errors),
        ):
            if journal.size:
                record = StoredFile(name, f"{name}.jsonl", journal.size, int(self._wall()), "batch_output")
                await _until_written(journal.sync)
                await _until_written(lambda record=record: self._space.add_file(record))  # type: ignore[misc]
                found[key] = name
            else:
                journal.path.unlink(missing_ok=True)
        await self._end(outcome, counts=self._counts(), **found)

    async def _append(self, journal: Journal, custom_id: str, line: bytes) -> None:
        """Writes a line. A cancelled caller does not interrupt the write, which would leave its outcome open."""
        write = asyncio.ensure_future(self._write(journal, custom_id, line))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        await asyncio.shield(write)

    async def _write(self, journal: Journal, custom_id: str, line: bytes) -> None:
        async with self._writing:
            await _until_written(lambda: journal.append(custom_id, line))

    async def _save(self, status: Status, **changes: Any) -> None:
        self._change(status, changes)
        await _until_written(lambda: self._space.save_batch(self._batch))

    async def _end(self, status: Status, **changes: Any) -> None:
        if (cancelled := self._space.cancelled_at(self._batch.id)) is not None and status == "cancelled":
            self._batch = replace(self._batch, times=self._batch.times | {"cancelling_at": cancelled})
        self._change(status, changes)
        await _until_written(lambda: self._space.end_batch(self._batch))

    def _change(self, status: Status, changes: dict[str, Any]) -> None:
        times = self._batch.times if status == self._batch.status else self._batch.times | {f"{status}_at": int(self._wall())}
        self._batch = replace(self._batch, status=status, times=times, **changes)


async def _until_written(write: Callable[[], None]) -> None:
    """Writes to the disk, again and again while it is full: what was answered must not be lost."""
    for tries in itertools.count():
        try:
            await asyncio.to_thread(write)
            return
        except OSError as error:
            if not tries:
                logger.warning("A batch waits for its storage: %s", error)
            await asyncio.sleep(DISK_S)
