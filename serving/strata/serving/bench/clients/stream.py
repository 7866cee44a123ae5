"""Minimal HTTP client for streamed completions, with little CPU time per event.

At tens of thousands of tokens per second, a client that parses every event would measure itself. This one splits events and
reads the clock. It decodes only the last event, which reports the usage.
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
    arrivals: tuple[float, ...]  # arrival time of each event with tokens; events of one read have the same time
    tokens: int
    error: str | None = None
    prefill: str = ""  # place of prefill from Strata's response header; empty with other servers


class Reply:
    """Incremental parser of one HTTP response."""

    def __init__(self) -> None:
        self.status = 0
        self._prefill = ""
        self.arrivals: list[float] = []
        self._raw = b""  # unparsed bytes: part of the head, of a chunk, or of a body with a known length
        self._text = b""  # an incomplete event, or the whole body if the response is not a stream
        self._last = b""
        self._chunked = False
        self._streamed = False
        self._length: int | None = None
        self._done = False

    @property
    def begun(self) -> bool:
        return bool(self.status or self._raw)

    def feed(self, data: bytes, now: float) -> bool:
        """Parses more bytes. Returns whether the response is complete."""
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
        """True if the response is complete when the server has closed the connection."""
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
        """Decodes chunked transfer encoding. Chunks need not be whole events: a proxy may split and join them."""
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
    """A keep-alive connection, for one request at a time."""

    def __init__(self) -> None:
        self.open = False
        self.used = False
        self.reply = Reply()
        self._complete: asyncio.Future[None] | None = None

    async def send(self, request: bytes) -> Reply:
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
    """Connection pool of a client process."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[Connection] = []

    async def send(self, request: bytes) -> Answer:
        """Sends a request. Retries if the server closed an idle connection before it responded, as HTTP clients do."""
        while True:
            connection = await self._acquire()
            reused = connection.used
            try:
                reply = await connection.send(request)
            except ConnectionResetError as error:
                if reused and not connection.reply.begun:
                    continue
                return Answer((), 0, str(error))
            except BaseException:
                connection.close()
                raise
            if connection.open:
                self._idle.append(connection)
            return reply.answer()

    async def _acquire(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(Connection, self._host, self._port)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
