"""Relays one request to a replica and its answer to the client, with retry and stream migration when replicas fail."""

import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any

from strata.serving.adapters.entry import Entry as Adapter
from strata.serving.api import requests
from strata.serving.api.dialects import errors, responses
from strata.serving.api.headers import EXPLAIN, REPLICA, WAITED
from strata.serving.api.requests import ApiError
from strata.serving.engine.request_context import unpack_event
from strata.serving.gateway.budget import Hold
from strata.serving.gateway.prefix_routing import Prefix, Queued
from strata.serving.gateway.routes import Routes
from strata.serving.gateway.standby import Engines
from strata.serving.gateway.suspects import Content, Suspects
from strata.serving.metrics import tracing
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.routing.kv.expected_wait import Chosen
from strata.serving.transport.link import Kind, LinkLost, Overrun, Stream
from strata.serving.transport.peers import Peer

# A request that loses replica after replica may be the cause.
TRIES = 4
# Limit on waiting for a replica. Serve needs less to restart an engine when all are gone.
REPLICA_WAIT_S = 300.0
KEEP_ALIVE_S = 5.0
EVENTS = "text/event-stream"
# Keeps proxies from buffering a stream.
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}

Send = Callable[[dict[str, Any]], Awaitable[None]]

logger = logging.getLogger("ray.serve")


class Relay:
    """State of one client request that outlives a replica: the connection and the tokens sent so far."""

    def __init__(
        self,
        routes: Routes,
        path: str,
        body: bytes,
        request_id: str,
        peers: Engines,
        suspects: Suspects,
        telemetry: Telemetry,
        send: Send,
        hold: Hold,
        prefix: Prefix | None = None,
        cache_salt: str | None = None,
        explain: bool = False,
        speculate: bool = True,
        name: str = "",
        span: tracing.Span = tracing.OFF,
        model: str | None = None,
        pool: str = "",
        adapter: Adapter | None = None,
    ) -> None:
        """`prefix`: names of the prompt's prefixes, where replicas are chosen by them. `cache_salt` separates the caches of
        tenants. `explain`: the client asks what the platform did for its answer. `speculate`: engines may draft tokens for
        it. `name`: the request id that it knows.
        `model`: what the replica serves, where the request gives an alias of it. `pool`: the model's engines. `adapter`: on
        the model, the same one on every replica."""
        self._prefix, self._model, self._adapter = prefix, model, adapter
        self._name, self._span, self._attempt = name, span, tracing.OFF
        self._routes, self._method = routes, routes.generating[path]
        self._body, self._request_id = body, request_id
        self._suspects, self._content = suspects, Content(self._method, body, pool)
        self._peers, self._telemetry, self._send, self._hold = peers, telemetry, send, hold
        self._explain, self._speculate = explain, speculate
        self._called: list[dict[str, Any]] = []  # replicas in order, each with the tokens sent before
        self._cache_salt = cache_salt
        self._began = time.monotonic()
        self._created = int(time.time())
        self._emitted: list[int] = []
        self._last_events = b""  # written last
        self._inter_token_s: list[float] = []
        self._first_token_at = self._last_token_at = 0.0
        self._chosen: Chosen[Peer] | None = None
        self._queued: Queued | None = None
        self._waited_s = 0.0  # until the first replica was available
        self._outage_s = 0.0  # total time without any engine, then or later
        self._finished = False  # the last token was sent; usage and [DONE] may be missing
        self._call: Stream | None = None
        self.status: int | None = None  # of the response, once started
        self.first_token_s: float | None = None
        self.usage: tuple[int, int] | None = None  # input and output tokens, once the replica has sent them

    @property
    def sent_tokens(self) -> int:
        """Tokens of a stream so far."""
        return len(self._emitted)

    @cached_property
    def _streams(self) -> bool:
        return requests.parse(self._body).get("stream") is True

    def cancel(self) -> None:
        self._begun()
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        try:
            await self._run()
        except ApiError as error:
            await self.fail(error)
        finally:
            self.cancel()
            self._attempt.end()
            if self._inter_token_s:
                self._telemetry.inter_token_latencies(self._inter_token_s)

    async def fail(self, error: ApiError) -> None:
        """Ends the answer with an error. If it has started, the error can only be sent as an event of the stream."""
        if self.status is None:
            try:
                raise error
            finally:
                del error  # an exception, its traceback and this frame would hold the answer until the garbage collector runs
        await self._write(errors.event(self._method, errors.body(self._method, error)), more=False)

    async def _run(self) -> None:
        lost: frozenset[str] = frozenset()
        for tries in itertools.count(1):
            if strikes := self._suspects.strikes(self._content):
                async with self._suspects.one_at_a_time(self._content):
                    peer, call = await self._call_replica(lost)
                    await call.arrived()
            else:
                peer, call = await self._call_replica(lost)
            try:
                await self._relay(call)
                if strikes:
                    self._suspects.clear(self._content)
                return
            except LinkLost as error:
                lost |= {peer.name}
                self._attempt.end(error=str(error))
                self._attempt = tracing.OFF
                self._span.event("failover", tokens=len(self._emitted), reason=str(error))
                if self._finished:
                    await self._write(errors.last_event(self._method), more=False)
                    return
                if error.verdict is not None and self._suspects.judge(self._content, error.verdict):
                    logger.warning("Request %s crashes engines (%s) and is refused.", self._request_id, error)
                    continue  # to the refusal
                self._check_resumable(tries, str(error))
            except Overrun:
                raise ApiError(408, "The stream was ended: the client read it more slowly than it was generated.") from None

    async def _call_replica(self, lost: frozenset[str]) -> tuple[Peer, Stream]:
        peer = await self._replica(lost)
        if self._call is None:
            self._waited_s = time.monotonic() - self._began
        strikes = self._suspects.strikes(self._content)  # the same content may have been refused meanwhile
        self._called.append({"name": peer.name, "after": len(self._emitted)})
        self._attempt = self._span.begin("call", "client", peer=peer.name, resumed_tokens=len(self._emitted))
        meta = {
            "request_id": self._request_id,
            "resumed": self._emitted,
            "strikes": strikes,
            "created": self._created,
            "cache_salt": self._cache_salt,
            "explain": self._explain,
            "speculate": self._speculate,
            "name": self._name,
            "trace": self._attempt.carrier,
        }
        if self._model is not None:
            meta["model"] = self._model
        if self._adapter is not None:
            meta["adapter"] = self._adapter.tree()
        if self._emitted and self._method == "responses":
            meta["events"] = responses.next_number(self._last_events)
        self._count(peer)
        self._call = peer.link.call(self._method, meta, self._body, self._routes.unread_bytes)
        return peer, self._call

    def _count(self, peer: Peer) -> None:
        """Counts the choice of a replica, and the prompt as queued there."""
        self._begun()
        assert self._chosen is not None and self._chosen.replica is peer
        self._telemetry.routed(self._chosen.reason)
        if self._prefix is not None and self._peers.routing is not None:
            self._queued = self._peers.routing.sent(self._chosen, self._prefix)

    def _begun(self) -> None:
        """The prompt is no longer queued: it has its first token, or its replica is lost."""
        if self._queued is not None:
            self._queued.done()
            self._queued = None

    def _choose(self, lost: frozenset[str]) -> Peer | None:
        adapter = self._adapter.engine_name if self._adapter is not None else None
        self._chosen = self._peers.choose(self._prefix, lost, adapter)
        return None if self._chosen is None else self._chosen.replica

    async def _replica(self, lost: frozenset[str]) -> Peer:
        if (peer := self._choose(lost)) is not None:
            return peer
        before, began = self._outage_s, time.monotonic()
        with self._telemetry.in_queue():
            while (peer := self._choose(lost)) is None:
                if time.monotonic() > began + REPLICA_WAIT_S:
                    raise ApiError(503, "No engine is up.", headers={"retry-after": "10"})
                await self._peers.changed(KEEP_ALIVE_S)
                self._outage_s = before + time.monotonic() - began
                await self._send_keep_alive()
        self._span.child("queue", began, reason="no-engine")
        return peer

    async def _send_keep_alive(self) -> None:
        """Sends an SSE comment, which clients skip. It starts a stream that has not started: clients and proxies drop silent
        connections. Later errors are sent as events of the stream."""
        if self._outage_s >= KEEP_ALIVE_S and self._streams:
            await self._start(200, UNBUFFERED | {"content-type": EVENTS})
        if self.status is not None:
            await self._write(f": waiting for a replica since {self._outage_s:.0f} s\n\n".encode())

    async def _relay(self, call: Stream) -> None:
        whole, head = b"", {"status": 200, "type": EVENTS, "headers": {}}
        while True:
            kind, payload = call.get_nowait() or await call.next()
            self._begun()
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

    async def _events(self, call: Stream, payload: bytes | None) -> None:
        """Sends all events that have arrived in one write."""
        events = []
        while payload is not None:
            self._finished, tokens, event = unpack_event(payload)
            self._emitted.extend(tokens)
            if tokens and self._routes.times_tokens:
                self._clock()
            self._telemetry.produced(len(tokens))
            events.append(event)
            payload = call.get_nowait_if(Kind.DATA)
        self._last_events = event
        await self._write(b"".join(events))

    def _clock(self) -> None:
        now = time.monotonic()
        if self._last_token_at:
            self._inter_token_s.append(now - self._last_token_at)
        else:
            self._first_token_at = now
            self.first_token_s = now - self._began
            self._telemetry.first_token(self.first_token_s)
        self._last_token_at = now

    async def _end(self, head: dict[str, Any], whole: bytes, trailer: dict[str, Any]) -> None:
        if "queued_s" in trailer:
            self._telemetry.queued(self._waited_s + trailer["queued_s"])
        self.usage = trailer.get("prompt_tokens", 0), 0
        if "prompt_tokens" in trailer:
            self.usage = trailer["prompt_tokens"], trailer.get("tokens", len(self._emitted))
            self._telemetry.tokens(*self.usage)
        self._measure(trailer)
        explanation = json.dumps(self._explanation(trailer)) if self._explain else ""
        if head["type"] == EVENTS:
            # A comment, which clients of event streams skip.
            await self._write(f": {EXPLAIN} {explanation}\n\n".encode() if explanation else b"", more=False)
        elif self.status is None:
            self._telemetry.produced(trailer.get("tokens", 0))
            headers = head["headers"] | ({EXPLAIN: explanation} if explanation else {})
            await self._answer(head["status"], whole, headers | {"content-type": head["type"]})
        else:  # refused by the replica that was to resume the stream
            await self._write(errors.event(self._method, whole), more=False)

    def _explanation(self, trailer: dict[str, Any]) -> dict[str, Any]:
        """Names and numbers of this request alone: the replicas that it was sent to, and what the last one reports."""
        waited = {"waited_s": round(self._outage_s, 3), "queued_s": round(self._waited_s + trailer.get("queued_s", 0.0), 4)}
        return {"replicas": self._called, **waited, **trailer.get("explained", {})}

    def _measure(self, trailer: dict[str, Any]) -> None:
        """Records what the choice of replicas is based on."""
        routing, meter = self._peers.routing, self._peers.meter
        if self._chosen is None:
            return
        if "prefilled" in trailer:
            meter.prefilled(*trailer["prefilled"])
        if self._last_token_at > self._first_token_at:
            meter.streamed(self._last_token_at - self._first_token_at, self._chosen.replica.busy)
        if routing is not None and self._prefix is not None:
            routing.counted(self._prefix, trailer.get("prompt_tokens", 0))

    def _check_resumable(self, tries: int, why: str) -> None:
        if tries == TRIES:
            raise _retryable(f"The request failed {tries} times. Last error: {why}.")
        if not self._emitted:
            self._telemetry.retried("replica-lost")
            return
        # Parsed again here: a parsed request needs up to ten times the memory of its bytes, so none is held.
        rule = self._routes.obstacles.get(self._method)
        obstacle = rule(requests.parse(self._body)) if rule is not None else None
        self._telemetry.migrated("refused" if obstacle else "continued")
        if obstacle:
            raise _retryable(
                f"The replica of this stream was lost, and a stream with {obstacle} cannot continue on another replica."
            )

    async def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        await self._start(status, headers | {"content-length": str(len(body))})
        await self._write(body, more=False)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        if self.status is not None:
            return
        self.status = status
        named = headers | ({WAITED: f"{self._outage_s:.1f}; reason=no-engine"} if self._outage_s else {})
        if self._chosen is not None:
            chosen = self._chosen
            named[REPLICA] = f"{chosen.replica.name}; cached={chosen.cached}; reason={chosen.reason}"
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write(self, body: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _retryable(why: str) -> ApiError:
    return ApiError(503, f"{why} Send the request again.", headers={"retry-after": "1"})
