"""RPC with streamed answers between the endpoint's processes: concurrent calls multiplexed over one TCP connection.

The path of a token from engine to client must be cheap. A Ray actor call costs a hundred microseconds; an HTTP connection per
stream costs a system call per token. Here everything that an engine produced in one step, for all of its streams, is sent in
one write.

A frame is a length, a call number, a kind and a payload. The caller sends CALL and optionally CANCEL; the callee answers with
any number of HEAD and DATA frames and one END. When the connection breaks or pings stay unanswered, all calls on it end with
`LinkLost`, which triggers failover.
"""

import asyncio
import hmac
import itertools
import json
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Any, cast

FRAME = struct.Struct("!IIB")
SECRET_BYTES = 32
PING_S = 1.0
# Longer than a process may compute without serving its event loop. A dead process is detected earlier, by its closed socket.
SILENCE_S = 20.0
CONNECT_S = 5.0
SECRET_S = 5.0  # limit for a caller to send the secret
MAX_UNTRUSTED = 64  # connections that have not sent the secret yet
MAX_ANSWER_BYTES = 64 * 2**20  # of an answer that is not streamed
MAX_FRAME_BYTES = 2 * MAX_ANSWER_BYTES
LARGE_BYTES = 64 * 2**10  # larger payloads are written separately instead of being copied into a joined buffer
UNSENT_BYTES = 64 * 2**20  # in the send buffer of a caller that does not read; above it the shorter UNSENT_S applies
UNSENT_S = 5.0
UNREAD_BYTES = 4 * 2**20  # received for one stream and not consumed
UNREAD_OF_LINK_BYTES = 32 * 2**20
PREFIXES = "prefixes"  # call of a gateway: streams the cached prefixes of a replica, as long as the link lasts


class Kind(IntEnum):
    CALL = 1
    CANCEL = 2
    HEAD = 3
    DATA = 4
    END = 5
    PING = 6
    PONG = 7


class LinkLost(Exception):
    """The process at the other end is gone or cannot continue this call. `verdict` is set for a request that was on an engine
    when the engine failed (see `engine/suspect_requests.py`)."""

    def __init__(self, reason: str, verdict: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.verdict = verdict


class Overrun(Exception):
    """A stream was consumed too slowly, and its unread chunks were dropped."""


class _Frames(asyncio.Protocol):
    """Framing for both ends. All frames sent within one iteration of the event loop are written together."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._outgoing: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        self._received += data
        start, end = 0, len(self._received)
        while end - start >= FRAME.size:
            length, number, kind = FRAME.unpack_from(self._received, start)
            stop = start + FRAME.size + length
            if length > MAX_FRAME_BYTES:
                self.abort()
                return
            if stop > end:
                break
            with memoryview(self._received) as view:  # slicing the bytearray itself would copy once more
                payload = bytes(view[start + FRAME.size : stop])
            self.frame(number, kind, payload)
            start = stop
        if start:
            del self._received[:start]

    def frame(self, number: int, kind: int, payload: bytes) -> None:
        raise NotImplementedError

    def send(self, number: int, kind: Kind, *payload: bytes) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(FRAME.pack(sum(map(len, payload)), number, kind))
        self._outgoing.extend(payload)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is None or self._transport.is_closing():
            return
        for large, parts in itertools.groupby(outgoing, lambda part: len(part) > LARGE_BYTES):
            for part in parts if large else (b"".join(parts),):
                self._transport.write(part)

    def close(self) -> None:
        """Closes the connection after sending what is queued."""
        if self._outgoing:
            self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Call:
    """Callee's side of a call."""

    def __init__(self, connection: "_Callee", number: int, method: str, meta: dict[str, Any], body: bytes) -> None:
        self._connection = connection
        self._number = number
        self.method, self.meta, self.body = method, meta, body

    def head(self, meta: dict[str, Any]) -> None:
        self._connection.send(self._number, Kind.HEAD, json.dumps(meta).encode())

    def data(self, payload: bytes) -> None:
        self._connection.send(self._number, Kind.DATA, payload)

    def end(self, meta: dict[str, Any]) -> None:
        self._connection.send(self._number, Kind.END, json.dumps(meta).encode())

    def close_server(self) -> None:
        """Closes the server that received this call, with all of its connections."""
        self._connection.server.close()


Handler = Callable[[Call], Awaitable[None]]


class _Callee(_Frames):
    def __init__(self, server: "Server") -> None:
        super().__init__()
        self.server = server
        self.trusted = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._background: set[int] = set()  # of these, those that are no work
        self._watching: asyncio.TimerHandle | None = None
        self._silent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if sum(not connection.trusted for connection in self.server.connections) >= MAX_UNTRUSTED:
            self.abort()
            return
        self.server.connections.add(self)
        self._watch()

    def _watch(self) -> None:
        """Aborts the connection of a caller that sends no pings: its calls are cancelled, and its buffers freed. Time is counted
        in iterations of this timer, so a stalled event loop here is not mistaken for a silent caller."""
        if self._silent_s > self._silence_limit():
            self.abort()
            return
        self._silent_s += PING_S
        self._watching = self._loop.call_later(PING_S, self._watch)

    def _silence_limit(self) -> float:
        if not self.trusted:
            return SECRET_S
        assert self._transport is not None
        return SILENCE_S if self._transport.get_write_buffer_size() < UNSENT_BYTES else UNSENT_S

    def data_received(self, data: bytes) -> None:
        if self.trusted:
            self._silent_s = 0.0
        else:
            self._received += data
            if len(self._received) < SECRET_BYTES:
                return
            if not hmac.compare_digest(bytes(self._received[:SECRET_BYTES]), self.server.secret):
                self.close()
                return
            self.trusted = True
            data = bytes(self._received[SECRET_BYTES:])
            self._received.clear()
        super().data_received(data)

    def frame(self, number: int, kind: int, payload: bytes) -> None:
        if kind == Kind.CALL:
            size = int.from_bytes(payload[:4], "big")
            opening = json.loads(payload[4 : 4 + size])
            call = Call(self, number, opening["method"], opening["meta"], payload[4 + size :])
            task = self._loop.create_task(self._run(call))
            self._tasks[number] = task
            if opening["background"]:
                self._background.add(number)
            task.add_done_callback(lambda _: self._forget(number))
        elif kind == Kind.CANCEL:
            if number in self._tasks:
                self._tasks[number].cancel()
        elif kind == Kind.PING:
            self.send(0, Kind.PONG, json.dumps(self.server.load()).encode())

    def _forget(self, number: int) -> None:
        self._tasks.pop(number, None)
        self._background.discard(number)

    async def _run(self, call: Call) -> None:
        try:
            await self.server.handler(call)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            call.end({"lost": f"{type(error).__name__}: {error}"})

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        if self._watching is not None:
            self._watching.cancel()
        for task in list(self._tasks.values()):
            task.cancel()

    @property
    def calls(self) -> int:
        return len(self._tasks) - len(self._background)


class Server:
    """Listens for calls. Every pong carries the result of `load`."""

    def __init__(self, handler: Handler, load: Callable[[], dict[str, Any]], secret: bytes) -> None:
        assert len(secret) == SECRET_BYTES
        self.handler, self.load, self.secret = handler, load, secret
        self.connections: set[_Callee] = set()
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str) -> str:
        self._listener = await asyncio.get_running_loop().create_server(lambda: _Callee(self), host, 0)
        address = self._listener.sockets[0].getsockname()
        return f"{address[0]}:{address[1]}"

    @property
    def calls(self) -> int:
        return sum(connection.calls for connection in self.connections)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close()


class Stream:
    """Caller's side of a call: the chunks of the answer, in order."""

    def __init__(self, link: "Link", number: int, unread_limit: int) -> None:
        self._link = link
        self._number = number
        self.unread_limit = unread_limit
        self._chunks: deque[tuple[int, bytes]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._lost: LinkLost | Overrun | None = None
        self._ended = self._streaming = False
        self.unread = 0  # bytes

    async def next(self) -> tuple[int, bytes]:
        await self.arrived()
        if not self._chunks and self._lost is not None:
            raise self._lost
        return self._pop()

    async def arrived(self) -> None:
        """Returns when a chunk has arrived or the call is lost."""
        while not self._chunks and self._lost is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def get_nowait(self) -> tuple[int, bytes] | None:
        """Next chunk if one has arrived, else None."""
        return self._pop() if self._chunks else None

    def get_nowait_if(self, kind: Kind) -> bytes | None:
        return self._pop()[1] if self._chunks and self._chunks[0][0] == kind else None

    def _pop(self) -> tuple[int, bytes]:
        chunk = self._chunks.popleft()
        if self.unread:
            self._link.count_unread(self, -min(self.unread, len(chunk[1])) if self._chunks else -self.unread)
        return chunk

    def put(self, kind: int, payload: bytes) -> None:
        if kind == Kind.END:
            self._ended = True
            self._link.forget(self._number)
            trailer = json.loads(payload)
            if "lost" in trailer:
                self._link.ending = self._link.ending or trailer.get("ending", False)
                self.lose(LinkLost(trailer["lost"], trailer.get("verdict")))
                return
        self._chunks.append((kind, payload))
        self._wake()
        if kind == Kind.DATA:
            if self._streaming:
                self._link.count_unread(self, len(payload))
            self._streaming = True  # the first chunk is not counted: a whole answer is consumed when it arrives

    def overrun(self) -> None:
        """Drops the unread chunks and ends the call."""
        self.cancel()
        self.lose(Overrun())

    def _drop(self) -> None:
        self._chunks.clear()
        self._link.count_unread(self, -self.unread)

    def lose(self, error: LinkLost | Overrun) -> None:
        self._ended = True
        self._lost = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """Ends the call; the callee frees its resources."""
        self._drop()
        if not self._ended:
            self._ended = True
            self._link.forget(self._number)
            self._link.send(self._number, Kind.CANCEL)


class Link(_Frames):
    """Caller's end of a connection. Create it with `connect`."""

    def __init__(self, address: str, when_lost: Callable[["Link"], None]) -> None:
        super().__init__()
        self.address = address
        self.load: dict[str, Any] = {}
        self.other_calls = 0  # calls of other callers, as of the last pong
        self._when_lost = when_lost
        self._streams: dict[int, Stream] = {}
        self._background: set[int] = set()  # of these, those that are no work
        self._unread = 0  # bytes of all streams
        self._lagging: set[Stream] = set()  # streams that arrive faster than they are consumed
        self._last_number = 0
        self._last_heard = self._loop.time()
        self._pinging: asyncio.TimerHandle | None = None
        self.alive = True
        self.ending = False  # the callee announced its end; it accepts no more calls

    @staticmethod
    async def connect(address: str, secret: bytes, when_lost: Callable[["Link"], None]) -> "Link":
        """Connects to a server. Raises OSError if nothing listens at `address`."""
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(CONNECT_S):
            _, link = await asyncio.get_running_loop().create_connection(lambda: Link(address, when_lost), host, int(port))
        assert link._transport is not None
        link._transport.write(secret)
        link._ping()
        return link

    @property
    def calls(self) -> int:
        return len(self._streams) - len(self._background)

    def call(
        self, method: str, meta: dict[str, Any], body: bytes = b"", unread_limit: int | None = None, background: bool = False
    ) -> Stream:
        """`unread_limit`: bytes of the answer that may wait for the caller to read them; None: UNREAD_BYTES. `background`: a call
        that lasts as long as the link. It does not count as load, and a callee that drains does not wait for it."""
        self._last_number = self._last_number % 0xFFFFFFFF + 1
        stream = self._streams[self._last_number] = Stream(self, self._last_number, unread_limit or UNREAD_BYTES)
        if not self.alive:
            stream.lose(LinkLost("the connection is closed"))
        if background:
            self._background.add(self._last_number)
        opening = json.dumps({"method": method, "meta": meta, "background": background}).encode()
        self.send(self._last_number, Kind.CALL, len(opening).to_bytes(4, "big") + opening, body)
        return stream

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)
        self._background.discard(number)

    def count_unread(self, stream: Stream, change: int) -> None:
        stream.unread += change
        self._unread += change
        if stream.unread > LARGE_BYTES:
            self._lagging.add(stream)
        elif not stream.unread:
            self._lagging.discard(stream)
        if stream.unread > stream.unread_limit:
            stream.overrun()
        elif change > 0 and self._unread > UNREAD_OF_LINK_BYTES:
            max(self._lagging or {stream}, key=lambda each: each.unread).overrun()

    def frame(self, number: int, kind: int, payload: bytes) -> None:
        self._last_heard = self._loop.time()
        if kind == Kind.PONG:
            self.load = json.loads(payload)
            self.other_calls = max(0, int(self.load.get("calls", 0)) - self.calls)
        elif stream := self._streams.get(number):
            stream.put(kind, payload)

    def _ping(self) -> None:
        if self._loop.time() - self._last_heard > SILENCE_S:
            self.abort()
            return
        self.send(0, Kind.PING)
        self._pinging = self._loop.call_later(PING_S, self._ping)

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self._pinging is not None:
            self._pinging.cancel()
        streams, self._streams, self._background = list(self._streams.values()), {}, set()
        for stream in streams:
            stream.lose(LinkLost(f"the connection to {self.address} broke"))
        self._when_lost(self)
