"""RPC handlers of a picture replica: a request for pictures, whole or streamed, and metrics."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from strata.platform.recipe import PictureServingSection
from strata.serving.api import pictures
from strata.serving.api.pictures import Order
from strata.serving.api.requests import ApiError
from strata.serving.diffusion.replica import events
from strata.serving.diffusion.replica.engine import Completed, Engine, Event, Job, Partial, Stepped
from strata.serving.diffusion.replica.worker_group import GroupLost
from strata.serving.engine.request_context import RequestContext
from strata.serving.transport.link import MAX_ANSWER_BYTES, Call

EVENTS = "text/event-stream"


class PictureCalls:
    def __init__(self, engine: Engine, section: PictureServingSection, metrics: Callable[[], str]) -> None:
        self._engine, self._section, self._metrics = engine, section, metrics

    async def handle(self, call: Call) -> None:
        try:
            if call.method == "images":
                await self._generate(call)
            elif call.method == "metrics":
                _answer(call, 200, self._metrics().encode(), "text/plain")
            else:
                raise LookupError(f"no such call: {call.method}")
        except ApiError as error:
            _answer(call, error.status, json.dumps(error.body).encode(), headers=error.headers)
        except GroupLost as error:  # the engine has given up: the gateway sends this and later requests to other replicas
            call.end({"lost": str(error), "ending": True})

    async def _generate(self, call: Call) -> None:
        order = pictures.order(json.loads(call.body), self._engine.model, self._section)
        sent = set(call.meta.get("resumed", ()))  # completed by a replica that was lost, and with the client already
        request = _Request(self._engine, order, [index for index in range(order.count) if index not in sent])
        try:
            if order.stream:
                await _stream(call, request)
            else:
                body = await _whole(request)
                if len(body) > MAX_ANSWER_BYTES:
                    raise ApiError(400, "The pictures are larger than an answer may be. Request fewer.", param="n")
                _answer(call, 200, body, trailer=request.trailer())
        finally:
            request.cancel()


class _Request:
    """Pictures of one request and their events."""

    def __init__(self, engine: Engine, order: Order, indexes: list[int]) -> None:
        self._engine, self.order, self.created = engine, order, int(time.time())
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._open: dict[int, Job] = {}
        self._waits: list[float] = []  # of the completed pictures, until their batch began
        for index in indexes:
            self._open[index] = engine.submit(order, index, lambda index, event: self._events.put_nowait((index, event)))

    @property
    def done(self) -> bool:
        return not self._open

    async def next(self) -> tuple[int, Stepped | Partial | Completed]:
        """Raises ApiError, or GroupLost if another replica should make the pictures."""
        index, event = await self._events.get()
        if isinstance(event, ApiError | GroupLost):
            raise event
        if isinstance(event, Completed):
            job = self._open.pop(index)
            self._waits.append((job.began or job.added) - job.added)
        return index, event

    def cancel(self) -> None:
        for job in self._open.values():
            self._engine.cancel(job)
        self._open.clear()

    def usage(self, text_tokens: int, count: int) -> dict[str, Any]:
        return events.usage(self.order, self._engine.model, text_tokens, count)

    def trailer(self) -> dict[str, Any]:
        return {"queued_s": max(self._waits, default=0.0)}


async def _whole(request: _Request) -> bytes:
    order, files, text_tokens = request.order, {}, 0
    while not request.done:
        index, event = await request.next()
        if isinstance(event, Completed):
            files[index] = await asyncio.to_thread(events.encode, event.picture, order)
            text_tokens = event.text_tokens
    ordered = [files[index] for index in sorted(files)]
    return events.answer(order, request.created, ordered, request.usage(text_tokens, len(ordered)))


async def _stream(call: Call, request: _Request) -> None:
    call.head({"status": 200, "type": EVENTS, "headers": {}})
    try:
        while not request.done:
            index, event = await request.next()
            if (text := await _text(request, index, event)) is not None:
                completed = isinstance(event, Completed)
                # The gateway remembers completed pictures as it does tokens: another replica can continue without them.
                context = RequestContext(unsent=[index] if completed else [], finished=completed and request.done)
                call.data(context.pack_event(text))
    except ApiError as error:
        call.data(RequestContext().pack_event(f"data: {json.dumps(error.body)}\n\n"))
    call.end(request.trailer())


async def _text(request: _Request, index: int, event: Stepped | Partial | Completed) -> str | None:
    order, created = request.order, request.created
    if isinstance(event, Stepped):
        return events.progress(order, created, index, event.step) if order.progress else None
    file = await asyncio.to_thread(events.encode, event.picture, order)
    if isinstance(event, Partial):
        return events.partial(order, created, index, event.number, file)
    return events.completed(order, created, index, file, request.usage(event.text_tokens, 1))


def _answer(
    call: Call,
    status: int,
    body: bytes,
    media: str = "application/json",
    headers: dict[str, str] | None = None,
    trailer: dict[str, Any] | None = None,
) -> None:
    call.head({"status": status, "type": media, "headers": headers or {}})
    call.data(body)
    call.end(trailer or {})
