"""ASGI application of the gateway: its routes, API keys, admission, and metrics."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from strata.serving.api import requests
from strata.serving.api.dialects import errors
from strata.serving.api.headers import DEADLINE, MAX_REQUEST_ID, REQUEST_ID, authorized, deadline, request_id
from strata.serving.api.limits import MAX_SEQUENCES
from strata.serving.api.requests import ApiError
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.budget import Budget, Hold
from strata.serving.gateway.cancellation import InProgress, owner
from strata.serving.gateway.keys import Keys
from strata.serving.gateway.readiness import Readiness
from strata.serving.gateway.relay import TRIES, Relay, Send
from strata.serving.gateway.routes import TEXT, Routes
from strata.serving.gateway.standby import Engines
from strata.serving.gateway.suspects import Suspects
from strata.serving.metrics import exposition, request_log, tracing
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.transport.link import Kind, LinkLost
from strata.serving.transport.peers import Peer, Peers

logger = logging.getLogger("ray.serve")

UPLOAD_S = 60.0  # limit for receiving a whole request
METRICS_S = 5.0
OPEN = ("/health", "/ready", "/-/healthz", "/-/routes", "/metrics")  # need no API key: probes and scrapers call them
NODE_SCOPE = b"scope=node"
VERDICT = "verdict"  # call between gateways: shares the verdict on a request under which an engine failed
CANCEL = "cancel"  # call between gateways: cancels a client's request, which may be on any of them

Receive = Callable[[], Awaitable[dict[str, Any]]]
Headers = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    pass


class App:
    def __init__(
        self,
        name: str,
        models: tuple[str, ...],
        decode: Peers,
        prefill: Peers | None,
        gateways: Peers,
        admission: Admission,
        telemetry: Telemetry,
        keys: Keys | None = None,
        node: str = "",
        readiness: Readiness | None = None,
        routes: Routes = TEXT,
    ) -> None:
        self._tracer = tracing.Tracer("gateway", name)
        self._name, self._models = name, models
        self._keys, self._node, self._routes = keys, node, routes
        self._decode, self._prefill, self._gateways = decode, prefill, gateways
        self._engines = Engines(decode, prefill)
        self._readiness = readiness or Readiness(decode, prefill)
        self._admission = admission
        self._telemetry = telemetry
        self.suspects = Suspects(self._broadcast_verdict)
        self.in_progress = InProgress()
        self._budget = Budget()
        self._collecting: dict[bool, asyncio.Task[str]] = {}
        self._began = int(time.time())

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        with self._budget.hold() as hold:
            await self._respond(scope, receive, send, hold)

    async def _respond(self, scope: dict[str, Any], receive: Receive, send: Send, hold: Hold) -> None:
        path, method = scope["path"], scope["method"]
        scope["headers"] = authorized(scope["headers"])
        named, unusable = request_id(scope["headers"])
        send = answer = _WithRequestId(send, named)
        request_log.current.set(named)
        try:
            if unusable:
                raise ApiError(400, f"'{REQUEST_ID}' must have at most {MAX_REQUEST_ID} characters, of printable ASCII.")
            if self._keys is not None and path not in OPEN:
                self._keys.check(scope["headers"])
            routes = self._routes
            if method == "POST" and path in routes.generating:
                await self._generate(path, named, scope["headers"], receive, send, hold)
                return
            if method == "POST" and path in routes.forwarded:
                status, media, body = await self._forward(routes.forwarded[path], scope["headers"], receive, hold)
            elif method == "DELETE" and (target := routes.cancelled(path)):
                status, media, body = await self._cancel(target, scope["headers"])
            elif method in ("GET", "HEAD"):
                status, media, body = await self._get(path, scope["query_string"])
            else:
                raise self._no_such(path, method)
            hold.grow(len(body))
            await _answer(send, status, body, {"content-type": media})
        except ApiError as error:
            await self._refuse(send, path, error)
        except ClientGone:
            pass
        except Exception:
            if answer.begun:
                raise
            logger.exception("Request %s failed.", named)
            await self._refuse(send, path, ApiError(500, "The server failed on this request."))

    async def _get(self, path: str, query: bytes) -> tuple[int, str, bytes]:
        if path in ("/health", "/-/healthz"):
            if not self._engines.healthy():
                raise ApiError(503, "No healthy engine is up.", headers={"retry-after": "5"})
            return 200, "text/plain", b"success"
        if path == "/ready":
            if obstacle := self._readiness.obstacle():
                raise ApiError(503, obstacle, headers={"retry-after": "1"})
            return _json({"status": "ready", "model": self._models[0]})
        if path == "/-/routes":
            return _json({"/": "strata"})
        if path == "/openapi.json":
            return _json(self._routes.document(self._models))
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", (await self._metrics(node_only=query == NODE_SCOPE)).encode()
        if path == "/v1/models":
            return _json({"object": "list", "data": [self._card(model) for model in self._models]})
        if path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            _require_model(name, self._models)
            return _json(self._card(name))
        raise self._no_such(path, "GET")

    async def _refuse(self, send: Send, path: str, error: ApiError) -> None:
        body = errors.body(self._routes.method(path), error)
        await _answer(send, error.status, body, {"content-type": "application/json"} | error.headers)

    def _no_such(self, path: str, method: str) -> ApiError:
        if allowed := self._routes.allowed(path):
            return ApiError(405, f"{method} {path}: only {allowed} is allowed.", headers={"allow": allowed})
        return ApiError(404, f"{method} {path}: there is no such route.")

    def _card(self, model: str) -> dict[str, Any]:
        card = {"id": model, "object": "model", "created": self._began, "owned_by": "strata"}
        peer = self._engines.least_busy()
        if peer is not None and "context" in peer.entry:  # a model of text
            card["max_model_len"] = peer.entry["context"]
        return card

    async def _generate(self, path: str, named: str, headers: Headers, receive: Receive, send: Send, hold: Hold) -> None:
        began = time.monotonic()
        span = self._tracer.begin(f"POST {path}", tracing.carrier(headers), http__route=path, request_id=named)
        try:
            limit_s = deadline(headers)
            body = await _body(headers, receive, hold)
            tree = requests.parse(body)
            _require_model(tree.get("model"), self._models)
            sequences = _sequences(tree)
            del tree  # parsed, a request takes up to ten times the memory of its bytes
            with self._admission.admitted(sequences), self._telemetry.in_flight():
                span.child("admission", began, sequences=sequences)
                request = (self._routes, path, body, uuid.uuid4().hex)
                relay = Relay(*request, self._engines, self.suspects, self._telemetry, send, hold, named, span)
                with self.in_progress.entered(named, headers) as cancelled:
                    left_s = None if limit_s is None else began + limit_s - time.monotonic()
                    status = await self._run(relay, receive, cancelled, left_s)
                    prompt, generated = relay.tokens
                    span.end(
                        http__response__status_code=status,
                        gen_ai__usage__input_tokens=prompt,
                        gen_ai__usage__output_tokens=generated,
                    )
        except ApiError as error:
            if error.status in (408, 413, 429, 503):
                self._telemetry.rejected(_REASONS[error.status])
            status = error.status
            span.end(error=str(error) if status >= 500 else "", http__response__status_code=status)
            await self._refuse(send, path, error)
        except ClientGone:
            self._telemetry.disconnected()
            span.end(error="the client disconnected")
            return
        self._telemetry.request_ended(path, status, time.monotonic() - began)

    async def _run(self, relay: Relay, receive: Receive, cancelled: "asyncio.Future[None]", limit_s: float | None) -> int:
        """Run the relay until the response is complete, the client disconnects or cancels, or its deadline has passed. Then free
        what it holds. Returns the status."""
        running = asyncio.ensure_future(relay.run())
        gone = asyncio.ensure_future(receive())  # the body was read: the next message can only be a disconnect
        try:
            ends: set[asyncio.Future[Any]] = {running, gone, cancelled}
            await asyncio.wait(ends, timeout=limit_s and max(0.0, limit_s), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            elif gone.done():
                raise ClientGone
            else:
                await _stop(running)
                await relay.fail(_cancelled() if cancelled.done() else _too_late(limit_s or 0.0))
            return relay.status or 0
        finally:
            running.cancel()
            gone.cancel()
            relay.cancel()
            # A task, its exception and this frame form a reference cycle. Without this, megabytes of a refused answer would
            # stay in memory until the garbage collector runs.
            del running, gone, ends

    async def _cancel(self, name: str, headers: Headers) -> tuple[int, str, bytes]:
        """Cancels a client's requests with this id, on any gateway."""
        of = owner(headers)
        found = self.in_progress.cancel(name, of)
        asked = [_cancel_at(gateway, name, of) for gateway in self._gateways.all() if gateway.name != self._name]
        found += sum(await asyncio.gather(*asked))
        if not found:
            raise ApiError(404, "No request with this id is in progress.", param="id")
        return _json({"id": name, "object": "image_generation", "cancelled": True})

    def _broadcast_verdict(self, digest: str, verdict: dict[str, Any]) -> None:
        for gateway in self._gateways.all():
            if gateway.name != self._name:
                gateway.link.call(VERDICT, {"digest": digest, "verdict": verdict})

    async def _forward(self, method: str, headers: Headers, receive: Receive, hold: Hold) -> tuple[int, str, bytes]:
        body = await _body(headers, receive, hold)
        tree = requests.parse(body)
        _require_model(tree.get("model"), self._models)
        del tree
        tried: frozenset[str] = frozenset()
        while len(tried) < TRIES and (peer := self._engines.least_busy(tried)) is not None and peer.name not in tried:
            try:
                return await _call(peer, method, body)
            except LinkLost:
                tried |= {peer.name}
        raise ApiError(503, "No engine is up.", headers={"retry-after": "5"})

    async def _metrics(self, node_only: bool) -> str:
        """Metrics text. Concurrent scrapes share one collection: it costs every replica time, and the route needs no key."""
        if node_only not in self._collecting:
            task = self._collecting[node_only] = asyncio.ensure_future(self._collect_metrics(node_only))
            task.add_done_callback(lambda _: self._collecting.pop(node_only))
        return await asyncio.shield(self._collecting[node_only])

    async def _collect_metrics(self, node_only: bool) -> str:
        """Metrics of every gateway and replica, so any gateway can be scraped. On a cluster Prometheus scrapes a gateway of
        every node; `scope=node` limits the answer to that node, so no series is counted twice."""
        gateways = [gateway for gateway in self._gateways.all() if gateway.name != self._name]
        peers = [*self._decode.all(), *(self._prefill.all() if self._prefill else []), *gateways]
        if node_only:
            peers = [peer for peer in peers if peer.entry["node"] == self._node]
        texts = await asyncio.gather(*(_metrics_of(peer) for peer in peers))
        return exposition.merge([({}, text) for text in (self._telemetry.text(), *texts)])


_REASONS = {408: "slow-upload", 413: "too-large", 429: "queue-full", 503: "no-replica"}


async def _call(peer: Peer, method: str, body: bytes) -> tuple[int, str, bytes]:
    call = peer.link.call(method, {}, body)
    try:
        _, head = await call.next()
        _, answer = await call.next()
        kind, _ = await call.next()
        assert kind == Kind.END
    finally:
        call.cancel()
    meta = json.loads(head)
    return meta["status"], meta["type"], answer


async def _metrics_of(peer: Peer) -> str:
    """Metrics text of one peer; empty if the peer is lost, so the others are still reported."""
    try:
        async with asyncio.timeout(METRICS_S):
            return (await _call(peer, "metrics", b""))[2].decode()
    except (LinkLost, TimeoutError):
        return ""


async def _cancel_at(gateway: Peer, name: str, of: str) -> int:
    """Requests that another gateway cancelled; none if it is lost."""
    call = gateway.link.call(CANCEL, {"name": name, "of": of})
    try:
        async with asyncio.timeout(METRICS_S):
            _, trailer = await call.next()
            return int(json.loads(trailer)["found"])
    except (LinkLost, TimeoutError):
        return 0
    finally:
        call.cancel()


async def _stop(running: "asyncio.Future[None]") -> None:
    running.cancel()
    await asyncio.wait({running})


def _cancelled() -> ApiError:
    return ApiError(409, "The request was cancelled.")


def _too_late(limit_s: float) -> ApiError:
    return ApiError(504, f"The request did not end within the {limit_s:.1f} s that '{DEADLINE}' leaves it.")


def _require_model(name: Any, models: tuple[str, ...]) -> None:
    if name is not None and name not in models:
        served = " and ".join(f"'{model}'" for model in models)
        raise ApiError(404, f"The model '{name}' does not exist; this endpoint serves {served}.", param="model")


def _sequences(tree: dict[str, Any]) -> int:
    """Sequences to admit for a request. An invalid `n` counts as one; the replica refuses it."""
    n = tree.get("n")
    return n if isinstance(n, int) and 0 < n <= MAX_SEQUENCES else 1


async def _body(headers: Headers, receive: Receive, hold: Hold) -> bytes:
    """Request body. A body that is too large is refused by its Content-Length, before any of it is read."""
    stated = next((int(value) for name, value in headers if name == b"content-length"), 0)
    _check_size(stated)
    hold.require(stated)
    body = bytearray()
    try:
        async with asyncio.timeout(UPLOAD_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                _check_size(len(body) + len(chunk))
                hold.grow(len(chunk))
                body += chunk
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, f"The request was not sent within {UPLOAD_S:.0f} s.") from None


def _check_size(count: int) -> None:
    if count > requests.MAX_BODY_BYTES:
        raise ApiError(413, f"The request is larger than {requests.MAX_BODY_BYTES // 2**20} MiB.")


def _json(tree: Any) -> tuple[int, str, bytes]:
    return 200, "application/json", json.dumps(tree).encode()


class _WithRequestId:
    """Adds the request id header to a response."""

    def __init__(self, send: Send, name: str) -> None:
        self._send, self._name = send, name
        self.begun = False

    async def __call__(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            message["headers"] = [*message["headers"], (REQUEST_ID.encode(), self._name.encode())]
        await self._send(message)


async def _answer(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in (headers | {"content-length": str(len(body))}).items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})
