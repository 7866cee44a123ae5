"""One request's way through the gateway, over as many replicas as it takes."""

import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any

from strata.serving.api import failover, requests
from strata.serving.api.headers import WAITED
from strata.serving.api.requests import ApiError
from strata.serving.engine.request_context import open_piece
from strata.serving.gateway.budget import Hold
from strata.serving.gateway.standby import Engines
from strata.serving.gateway.suspects import Content, Suspects
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.transport.link import Kind, LinkLost, Overrun, Stream
from strata.serving.transport.peers import Peer

# A request that loses replica after replica may be what kills them.
TRIES = 4
# Serve needs less than this to start an engine anew, should all be gone.
PATIENCE_S = 300.0
KEEP_ALIVE_S = 5.0
EVENTS = "text/event-stream"
# To clients behind a proxy that would collect a stream before it passes it on.
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}

Send = Callable[[dict[str, Any]], Awaitable[None]]

logger = logging.getLogger("ray.serve")


class Relay:
    """What outlives a replica: the client's connection, and what it has been sent."""

    def __init__(
        self,
        method: str,
        body: bytes,
        request_id: str,
        peers: Engines,
        suspects: Suspects,
        telemetry: Telemetry,
        send: Send,
        hold: Hold,
    ) -> None:
        self._method, self._body, self._request_id = method, body, request_id
        self._suspects, self._content = suspects, Content(method, body)
        self._peers, self._telemetry, self._send, self._hold = peers, telemetry, send, hold
        self._began = time.monotonic()
        self._emitted: list[int] = []
        self._gaps: list[float] = []
        self._last_token_at = 0.0
        self._waited_s = 0.0  # until there was a replica
        self._outage_s = 0.0  # of it and later, while no engine was up
        self._finished = False  # the last token is out; usage and the end mark may be missing
        self._call: Stream | None = None
        self.status: int | None = None  # of the answer, once it has begun

    @cached_property
    def _streams(self) -> bool:
        return requests.parse(self._body).get("stream") is True

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        try:
            await self._run()
        except ApiError as error:
            if self.status is None:
                raise
            # The answer has begun: what is wrong can only be said within it.
            await self._write(b"data: " + json.dumps(error.body).encode() + b"\n\n", more=False)
        finally:
            self.cancel()
            if self._gaps:
                self._telemetry.tokens_came(self._gaps)

    async def _run(self) -> None:
        lost: frozenset[str] = frozenset()
        for tries in itertools.count(1):
            if strikes := self._suspects.strikes(self._content):
                async with self._suspects.apart(self._content):
                    peer, call = await self._ask(lost)
                    await call.arrived()
            else:
                peer, call = await self._ask(lost)
            try:
                await self._relay(call)
                if strikes:
                    self._suspects.clear(self._content)
                return
            except LinkLost as error:
                lost |= {peer.name}
                if self._finished:
                    await self._write(b"data: [DONE]\n\n", more=False)
                    return
                if error.verdict is not None and self._suspects.judge(self._content, error.verdict):
                    logger.warning("Request %s kills engines (%s) and is refused.", self._request_id, error)
                    continue  # to the refusal
                self._check_that_it_can_go_on(tries, str(error))
            except Overrun:
                raise ApiError(408, "The stream was ended: it was read more slowly than it was generated.") from None

    async def _ask(self, lost: frozenset[str]) -> tuple[Peer, Stream]:
        peer = await self._replica(lost)
        if self._call is None:
            self._waited_s = time.monotonic() - self._began
        strikes = self._suspects.strikes(self._content)  # another like it may have been refused meanwhile
        meta = {"request_id": self._request_id, "resumed": self._emitted, "strikes": strikes}
        self._call = peer.link.call(self._method, meta, self._body)
        return peer, self._call

    async def _replica(self, lost: frozenset[str]) -> Peer:
        peer = self._peers.least_busy(lost)
        if peer is not None:
            return peer
        before, began = self._outage_s, time.monotonic()
        with self._telemetry.in_queue():
            while (peer := self._peers.least_busy(lost)) is None:
                if time.monotonic() > began + PATIENCE_S:
                    raise ApiError(503, "No engine is up.", headers={"retry-after": "10"})
                await self._peers.changed(KEEP_ALIVE_S)
                self._outage_s = before + time.monotonic() - began
                await self._tell_that_it_waits()
        return peer

    async def _tell_that_it_waits(self) -> None:
        """In a comment, which clients skip. A stream that has not begun by then begins with it: a connection on which nothing
        comes is what clients and proxies give up first. What goes wrong later is an event of the stream."""
        if self._outage_s >= KEEP_ALIVE_S and self._streams:
            await self._start(200, UNBUFFERED | {"content-type": EVENTS})
        if self.status is not None:
            await self._write(f": waiting for a replica since {self._outage_s:.0f} s\n\n".encode())

    async def _relay(self, call: Stream) -> None:
        whole, head = b"", {"status": 200, "type": EVENTS, "headers": {}}
        while True:
            kind, payload = call.take() or await call.next()
            if kind == Kind.DATA and head["type"] == EVENTS:
                await self._events(call, payload)
            elif kind == Kind.DATA:
                self._hold.grow(len(payload))
                whole = payload
            elif kind == Kind.HEAD:
                head = json.loads(payload)
                if head["type"] == EVENTS:
                    await self._start(200, head["headers"] | UNBUFFERED | {"content-type": EVENTS})
            else:
                await self._end(head, whole, json.loads(payload))
                return

    async def _events(self, call: Stream, piece: bytes | None) -> None:
        """Whatever has come by now leaves together."""
        events = []
        while piece is not None:
            self._finished, tokens, event = open_piece(piece)
            self._emitted.extend(tokens)
            if tokens:
                self._clock()
            events.append(event)
            piece = call.take_if(Kind.DATA)
        await self._write(b"".join(events))

    def _clock(self) -> None:
        now = time.monotonic()
        if self._last_token_at:
            self._gaps.append(now - self._last_token_at)
        else:
            self._telemetry.first_token(now - self._began)
        self._last_token_at = now

    async def _end(self, head: dict[str, Any], whole: bytes, trailer: dict[str, Any]) -> None:
        if "prompt_tokens" in trailer:
            self._telemetry.queued(self._waited_s + trailer["queued_s"])
            self._telemetry.tokens(trailer["prompt_tokens"], trailer.get("tokens", len(self._emitted)))
        if head["type"] == EVENTS:
            await self._write(b"", more=False)
        elif self.status is None:
            await self._answer(head["status"], whole, head["headers"] | {"content-type": head["type"]})
        else:  # refused by the replica that was to go on with a stream
            await self._write(b"data: " + whole + b"\n\n", more=False)

    def _check_that_it_can_go_on(self, tries: int, why: str) -> None:
        if tries == TRIES:
            raise _again(f"This request failed on {tries} tries; the last time: {why}.")
        if not self._emitted:
            self._telemetry.retried("replica-lost")
            return
        # Parsed anew: a parsed request takes up to ten times the memory of its bytes, so it is not kept.
        obstacle = failover.obstacle(requests.parse(self._body))
        self._telemetry.migrated("refused" if obstacle else "continued")
        if obstacle:
            raise _again(f"The replica that generated this stream was lost, and a stream with {obstacle} cannot go on elsewhere.")

    async def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        await self._start(status, headers | {"content-length": str(len(body))})
        await self._write(body, more=False)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        if self.status is not None:
            return
        self.status = status
        named = headers | ({WAITED: f"{self._outage_s:.1f}; reason=no-engine"} if self._outage_s else {})
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write(self, body: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _again(why: str) -> ApiError:
    return ApiError(503, f"{why} Send the request again.", headers={"retry-after": "1"})
