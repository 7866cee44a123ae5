"""One streamed completion over a raw connection: as little work for each event as timing it takes.

A client that parses every event is itself what a benchmark of tens of thousands of tokens a second measures. Here an
event costs a split and a clock reading; only the last one, which reports the usage, is decoded.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import cast

from strata.serving.api.headers import PREFILL

DONE = b"data: [DONE]"


@dataclass(frozen=True)
class Answer:
    arrivals: tuple[float, ...]  # when each event with tokens was there; events that came in one read share their time
    tokens: int
    error: str | None = None
    prefill: str = ""  # where our endpoint says that it was prefilled; others say nothing


class Reply:
    """What has come of one HTTP response, fed with bytes as they arrive."""

    def __init__(self) -> None:
        self.status = 0
        self._prefill = ""
        self.arrivals: list[float] = []
        self._raw = b""  # not yet taken apart: a part of the head, of a chunk, or of a body with a known length
        self._text = b""  # an event that is not yet complete, or the whole body of a response that is no stream
        self._last = b""
        self._chunked = False
        self._streamed = False
        self._length: int | None = None
        self._done = False

    @property
    def begun(self) -> bool:
        return bool(self.status or self._raw)

    def feed(self, data: bytes, now: float) -> bool:
        """Whether the response is complete."""
        self._raw += data
        if not self.status and not self._read_head():
            return False
        body, complete = self._dechunk() if self._chunked else self._plain()
        if not self._streamed:
            self._text += body
            return complete
        *events, self._text = (self._text + body).split(b"\n\n")
        for event in events:
            if event == DONE:
                self._done = True
            elif event.startswith(b"data:"):
                self.arrivals.append(now)
                self._last = event
        return complete

    def closed(self) -> bool:
        """Whether it is complete now that the server has closed the connection."""
        return self._done or (self.status != 0 and not self._chunked and self._length is None)

    def answer(self) -> Answer:
        if self.status != 200:
            return Answer((), 0, f"HTTP {self.status}: {self._text[:200].decode(errors='replace')}")
        if not self._done:
            return Answer((), 0, "the stream ended without [DONE]")
        last = json.loads(self._last.removeprefix(b"data:"))
        if "error" in last:
            return Answer((), 0, f"error in the stream: {json.dumps(last['error'])[:200]}")
        if not last.get("usage"):
            return Answer((), 0, "the stream reported no usage")
        arrivals = self.arrivals if last["choices"] else self.arrivals[:-1]
        if not arrivals:
            return Answer((), 0, "the stream had no tokens")
        return Answer(tuple(arrivals), int(last["usage"]["completion_tokens"]), prefill=self._prefill)

    def _read_head(self) -> bool:
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            return False
        status, *fields = head.lower().split(b"\r\n")
        headers = {name: value.strip() for name, _, value in (field.partition(b":") for field in fields)}
        self.status = int(status.split()[1])
        self._prefill = headers.get(PREFILL.encode(), b"").partition(b";")[0].decode()
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        self._length = int(headers[b"content-length"]) if b"content-length" in headers else None
        self._streamed = self.status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._raw = rest
        return True

    def _dechunk(self) -> tuple[bytes, bool]:
        """Chunks need not be events: a proxy may cut and join them as it likes."""
        raw, at, parts = self._raw, 0, []
        complete = False
        while not complete and (end := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:end].partition(b";")[0], 16)
            after = end + 2 + size
            if len(raw) < after + 2:
                break
            parts.append(raw[end + 2 : after])
            at = after + 2
            complete = size == 0
        self._raw = raw[at:]
        return b"".join(parts), complete

    def _plain(self) -> tuple[bytes, bool]:
        body, self._raw = self._raw, b""
        if self._length is None:
            return body, False
        self._length -= len(body)
        return body, self._length <= 0


class Connection(asyncio.Protocol):
    """Kept open from one request to the next; one request at a time."""

    def __init__(self) -> None:
        self.open = False
        self.used = False
        self.reply = Reply()
        self._complete: asyncio.Future[None] | None = None

    async def ask(self, request: bytes) -> Reply:
        self.reply = Reply()
        self._complete = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._complete
        self.used = True
        return self.reply

    def close(self) -> None:
        self.open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        if self.reply.feed(data, time.perf_counter()):
            self._settle(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._settle(None if self.reply.closed() else ConnectionResetError("the server closed the connection"))

    def _settle(self, error: Exception | None) -> None:
        if self._complete is None or self._complete.done():
            return
        if error is None:
            self._complete.set_result(None)
        else:
            self._complete.set_exception(error)


class Connections:
    """The connections of one client process to one server."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[Connection] = []

    async def ask(self, request: bytes) -> Answer:
        """A server may close an idle connection just as a request is on its way; then, as any client, ask once more."""
        while True:
            connection = await self._take()
            again = connection.used
            try:
                reply = await connection.ask(request)
            except ConnectionResetError as error:
                if again and not connection.reply.begun:
                    continue
                return Answer((), 0, str(error))
            except BaseException:
                connection.close()
                raise
            if connection.open:
                self._idle.append(connection)
            return reply.answer()

    async def _take(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(Connection, self._host, self._port)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
