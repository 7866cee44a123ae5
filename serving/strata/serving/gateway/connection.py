"""HTTP/1.1 connection with bounded memory and time, on top of uvicorn's protocol.

uvicorn waits without limit for a header, a trailer, the next byte of an unread body or a client that does not read, and
holds what arrived in the meantime. Here every state of a connection has a limit in bytes and in seconds:

| state | bytes | seconds |
|---|---|---|
| header | HEADER_BYTES, MAX_HEADERS | HEADER_S |
| body | framing and trailers: FRAMING_BYTES; data: budget.py | UPLOAD_S of app.py |
| answer in progress | received meanwhile: BUFFERED_BYTES, then reading stops | - |
| client does not read | the transport's buffer, WRITE_BYTES each time | STALLED_S |
| idle | - | uvicorn's keep-alive timeout |
| closing | what arrives is dropped | CLOSE_S, LINGER_S |
"""

import asyncio
import json
import urllib.parse
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from strata.serving.api.requests import ApiError

HEADER_S = 15.0
HEADER_BYTES = 32 * 2**10
MAX_HEADERS = 128
FRAMING_BYTES = 256 * 2**10  # chunk sizes, chunk extensions and trailers: 16 MiB in chunks of 512 bytes need 230 KiB
BUFFERED_BYTES = 16 * 2**10
BUFFERED_LIMIT = 2**20  # far more than the event loop may still deliver after reading was paused
MAX_PIPELINED = 8
WRITE_BYTES = 64 * 2**10
STALLED_S = 30.0
CLOSE_S = 30.0  # for the client to read the rest of an answer before the connection is closed
# Closing a connection while the client still sends resets it, and the client may never see the answer. For this long the rest
# is received and dropped.
LINGER_S = 5.0
# The same for a client that sends its next request while the server shuts down: one round trip.
DRAIN_LINGER_S = 1.0


class ConnectionTable:
    """Open connections of one server. Beyond the limit, the connection that has waited longest for its client is closed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # for more of a request from the client; longest wait first

    def opened(self, connection: "Connection") -> bool:
        """Returns whether the connection fits the limit, after closing the one that has waited longest if needed."""
        self._open.add(connection)
        if len(self._open) > self._limit:
            if not self._waiting:
                return False
            victim = next(iter(self._waiting))
            self.closed(victim)
            victim.abort()
        self._waiting[connection] = None
        return True

    def closed(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def answering(self, connection: "Connection") -> None:
        self._waiting.pop(connection, None)

    def waiting(self, connection: "Connection") -> None:
        if connection in self._open:
            self._waiting[connection] = None


class _Transport:
    """Transport wrapper for uvicorn. `close` has a deadline and lets the client finish sending."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._deadline: asyncio.TimerHandle | None = None
        self.linger = False  # the client has not sent all of its request
        self.draining = False  # the client may send another request, which will not be answered
        self.write, self.get_extra_info = transport.write, transport.get_extra_info
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading

    def is_closing(self) -> bool:
        return self._deadline is not None or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if self.linger or self.draining:
            self._deadline = self._loop.call_later(LINGER_S if self.linger else DRAIN_LINGER_S, self._end_linger)
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._close()

    def _end_linger(self) -> None:
        if self._transport.get_write_buffer_size():
            self._close()
        else:
            self._transport.abort()

    def _close(self) -> None:
        self._deadline = self._loop.call_later(CLOSE_S, self._transport.abort)
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def lost(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


class Exchange(RequestResponseCycle):
    """A request and its answer."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start" and self.more_body:
            self.keep_alive = False  # the rest of this request cannot be distinguished from the next request
        body = memoryview(message.get("body", b""))
        last = max(0, len(body) - 1) // WRITE_BYTES * WRITE_BYTES
        for start in range(0, last, WRITE_BYTES):  # each write waits until the client has read most of the previous one
            chunk = bytes(body[start : start + WRITE_BYTES])
            await super().send({"type": "http.response.body", "body": chunk, "more_body": True})
        await super().send(message | {"body": bytes(body[last:])} if last else message)

    def end(self) -> None:
        """Wakes the application: the client is gone, or was already answered."""
        self.disconnected = True
        self.message_event.set()


class Connection(HttpToolsProtocol):
    cycle: Exchange

    def __init__(self, *, table: ConnectionTable, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._table = table
        self._wire: _Transport = cast(Any, None)
        self._header_deadline: asyncio.TimerHandle | None = None
        self._read_deadline: asyncio.TimerHandle | None = None
        self._in_header = False
        self._header_bytes = self._headers = 0
        self._framing = 0  # bytes since the end of the last request that are not part of a body
        self._buffered = bytearray()  # received while a request is being answered
        self._discarding = False  # received bytes are dropped until the current answer is complete
        self._running: Exchange | None = None

    def connection_made(self, transport: Any) -> None:
        self._wire = _Transport(transport, self.loop)
        super().connection_made(cast(Any, self._wire))
        if self._table.opened(self):
            self._expect_header()
        else:
            self._refuse(ApiError(429, "Too many open connections.", headers={"retry-after": "1"}))

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.closed(self)
        self._wire.lost()
        for timer in (self._header_deadline, self._read_deadline):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.end()
        super().connection_lost(exc)

    def abort(self) -> None:
        self._wire.abort()

    def shutdown(self) -> None:
        self._wire.draining = self._answering()
        super().shutdown()

    # Bytes from the client

    def data_received(self, data: bytes) -> None:
        if self._discarding or self._wire.is_closing():
            return
        if self._answering():
            self._buffered += data
            if len(self._buffered) > BUFFERED_LIMIT:
                self.abort()
            elif len(self._buffered) > BUFFERED_BYTES:
                self.flow.pause_reading()
        else:
            self._feed(data)

    def _answering(self) -> bool:
        return bool(self.pipeline) or not (self.cycle is None or self.cycle.response_complete or self.cycle.more_body)

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._header_deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_header()
        self._framing += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._discarding = True  # answered as a plain request; what follows is in another protocol
            self.cycle.keep_alive = False
        except httptools.HttpParserError as error:
            cause = error.__context__ or error
            self._refuse(cause if isinstance(cause, ApiError) else ApiError(400, f"The request is not valid HTTP: {cause}"))
            return
        if self._in_header or self._header_deadline is not None:
            if self._framing > HEADER_BYTES:
                self._refuse(_large_header())
        elif self._framing > HEADER_BYTES + FRAMING_BYTES:
            limit = FRAMING_BYTES // 2**10
            self._refuse(ApiError(413, f"The request has more than {limit} KiB of chunk headers and trailers."))

    def _expect_header(self) -> None:
        self._header_deadline = self.loop.call_later(HEADER_S, self._header_too_slow)

    def _header_too_slow(self) -> None:
        self._header_deadline = None
        if self._in_header or self._framing:
            self._refuse(ApiError(408, f"The header of the request was not sent within {HEADER_S:.0f} s."))
        else:
            self._wire.close()

    # The parser's callbacks

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ApiError(429, f"More than {MAX_PIPELINED} requests were sent before the first was answered.")
        super().on_message_begin()
        self._in_header = self._wire.linger = True
        self._header_bytes = self._headers = 0

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_header:
            return  # a trailer: ignored
        self._headers += 1
        if self._headers > MAX_HEADERS:
            raise ApiError(431, f"The request has more than {MAX_HEADERS} headers.")
        self._count_header(len(name) + len(value))
        super().on_header(name, value)

    def _count_header(self, count: int) -> None:
        self._header_bytes += count
        if self._header_bytes > HEADER_BYTES:
            raise _large_header()

    def on_headers_complete(self) -> None:
        self._in_header = False
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None
        url = httptools.parse_url(self.url)
        if url.path is None:
            raise ApiError(400, "The request names no path.")
        version = self.parser.get_http_version()
        self.scope |= {
            "method": self.parser.get_method().decode("ascii"),
            "http_version": version,
            "path": urllib.parse.unquote(url.path.decode("latin-1")),
            "raw_path": url.path,
            "query_string": url.query or b"",
        }
        before, self.cycle = self.cycle, self._exchange(keep_alive=version != "1.0" and self.parser.should_keep_alive())
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _exchange(self, keep_alive: bool) -> Exchange:
        return Exchange(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )

    def on_body(self, body: bytes) -> None:
        self._framing -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._framing = 0
        self._wire.linger = False
        self._table.answering(self)
        super().on_message_complete()

    # Answers

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._wire.is_closing() or self._answering():
            return
        self._table.waiting(self)
        if self._in_header and self._header_deadline is None:
            self._expect_header()
        if self._buffered:
            data, self._buffered = bytes(self._buffered), bytearray()
            self._feed(data)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, error: ApiError) -> None:
        self._wire.linger = True
        running = self._running
        if running is not None and not running.response_complete:
            if running is not self.cycle or self._in_header or not running.more_body or running.response_started:
                # The error follows a request whose answer is in progress. That answer is completed first.
                self._discarding = True
                self.pipeline.clear()
                running.keep_alive = False
                return
            running.end()
        body = json.dumps(error.body).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"} | error.headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._wire.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body)
        self._wire.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._read_deadline is None:
            self._read_deadline = self.loop.call_later(STALLED_S, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None


def _large_header() -> ApiError:
    return ApiError(431, f"The header of the request is larger than {HEADER_BYTES // 2**10} KiB.")
