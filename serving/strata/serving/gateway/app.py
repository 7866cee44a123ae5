"""ASGI application of the gateway: its routes, API keys, admission, and metrics."""

import asyncio
import functools
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol
from urllib.parse import parse_qs

from strata.serving.adapters import api
from strata.serving.api import requests
from strata.serving.api.dialects import errors
from strata.serving.api.headers import (
    DEADLINE,
    MAX_REQUEST_ID,
    REQUEST_ID,
    authorized,
    deadline,
    explained,
    request_id,
    speculates,
)
from strata.serving.api.requests import ApiError
from strata.serving.catalogue import admin as models_admin
from strata.serving.gateway.budget import Budget, Hold
from strata.serving.gateway.cancellation import InProgress, owner
from strata.serving.gateway.journey import CLIENT_GONE, Answer, ClientGone, Journey
from strata.serving.gateway.keys import Keys
from strata.serving.gateway.pool import Pool, Pools, Target
from strata.serving.gateway.prefix_routing import Prefix, prefix_of
from strata.serving.gateway.relay import KEEP_ALIVE_S, REPLICA_WAIT_S, TRIES, Relay, Send
from strata.serving.gateway.routes import TEXT, Routes
from strata.serving.gateway.suspects import Suspects
from strata.serving.metrics import exposition, request_log, tracing
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.page import files, state
from strata.serving.tenants import admin
from strata.serving.tenants.audit import AuditLog
from strata.serving.tenants.estimate import Estimate, estimate, sequences_of
from strata.serving.tenants.gate import Entry, Gate
from strata.serving.tenants.refusal import LimitReached
from strata.serving.tenants.tenant import Caller
from strata.serving.transport.link import Kind, LinkLost
from strata.serving.transport.peers import Peer, Peers

logger = logging.getLogger("ray.serve")

UPLOAD_S = 60.0  # limit for receiving a whole request
METRICS_S = 5.0
OPEN = ("/health", "/ready", "/-/healthz", "/-/routes", "/metrics")  # need no API key: probes and scrapers call them
NODE_SCOPE = b"scope=node"
VERDICT = "verdict"  # call between gateways: shares the verdict on a request under which an engine failed
CANCEL = "cancel"  # call between gateways: cancels a client's request, which may be on any of them

CALLER = "strata.caller"  # key of the scope: the tenant for whom the gateway itself sends a request. HTTP cannot set it

Receive = Callable[[], Awaitable[dict[str, Any]]]
Headers = list[tuple[bytes, bytes]]
AdminCall = Callable[[str, str, bytes], Awaitable[tuple[int, bytes]]]  # method, path and body to status and answer


class Batches(Protocol):
    """Routes of files and batches (`batches.api`)."""

    def owns(self, path: str) -> bool: ...

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send, caller: Caller | None) -> None: ...


class App:
    def __init__(
        self,
        name: str,
        pools: Pools,
        gateways: Peers,
        keys: Keys | None = None,
        node: str = "",
        routes: Routes = TEXT,
        gate: Gate | None = None,
        audit: AuditLog | None = None,
        model_admin: AdminCall | None = None,
        batches: Batches | None = None,
    ) -> None:
        """`gate` admits the requests of tenants, the admission of a model's pool those of everybody else. `batches` answers the
        routes of files and batches."""
        self._batches = batches
        self._tracer = tracing.Tracer("gateway", name)
        self._name, self._pools, self._gateways = name, pools, gateways
        self._keys, self._node, self._routes = keys, node, routes
        self._gate, self._audit, self._model_admin = gate, audit, model_admin
        self.suspects = Suspects(self._broadcast_verdict)
        self.in_progress = InProgress()
        self._budget = Budget()
        self._collecting: dict[bool, asyncio.Task[str]] = {}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        scope["headers"] = authorized(scope["headers"])
        named, unusable = request_id(scope["headers"])
        request_log.current.set(named)
        answer, journey = Answer(send, named), Journey(self._routes.known(scope["path"]))
        try:
            with self._budget.hold() as hold:
                await self._respond(scope, receive, answer, hold, named, unusable, journey)
        finally:
            if self._audit is not None and scope["path"] not in OPEN:
                self._audit.write(journey.line(named, answer.status))

    async def _respond(
        self, scope: dict[str, Any], receive: Receive, send: Answer, hold: Hold, named: str, unusable: bool, journey: Journey
    ) -> None:
        path, method = scope["path"], scope["method"]
        try:
            if unusable:
                raise ApiError(400, f"'{REQUEST_ID}' must have at most {MAX_REQUEST_ID} characters, of printable ASCII.")
            if CALLER in scope:
                journey.caller = scope[CALLER]
            elif self._keys is not None and path not in OPEN and path not in files.table():
                journey.caller = self._keys.check(scope["headers"])
                if self._gate is not None and journey.caller is not None:
                    send.more = functools.partial(self._gate.headers, journey.caller.tenant)
            routes = self._routes
            if self._model_admin is not None and models_admin.is_route(path):
                admin.require(scope, journey.caller, self._keys is not None)
                data = b"" if method in ("GET", "HEAD") else await _body(scope["headers"], receive, hold)
                status, body = await self._model_admin(method, path, data)
                await _answer(send, status, body, {"content-type": "application/json"})
                return
            if method == "POST" and path in routes.generating:
                await self._generate(path, named, scope["headers"], receive, send, hold, journey)
                return
            if self._batches is not None and self._batches.owns(path):
                await self._batches(scope, receive, send, journey.caller)
                return
            if method == "POST" and path in routes.forwarded:
                status, media, body = await self._forward(routes.forwarded[path], scope["headers"], receive, hold, journey)
            elif method == "POST" and path in api.ROUTES:
                admin.require(scope, journey.caller, self._keys is not None)
                tree = requests.parse(await _body(scope["headers"], receive, hold))
                status, media, body = 200, "text/plain", (await self._pools.change_adapter(api.read(path, tree))).encode()
            elif method == "DELETE" and (target := routes.cancelled(path)):
                status, media, body = await self._cancel(target, scope["headers"])
            elif method in ("GET", "HEAD") and (file := files.answer(path, scope["headers"])):
                await _answer(send, *file)
                return
            elif method in ("GET", "HEAD"):
                status, media, body = await self._get(path, scope["query_string"], journey.caller)
            else:
                raise self._no_such(path, method)
            hold.grow(len(body))
            await _answer(send, status, body, {"content-type": media})
        except ApiError as error:
            await self._refuse(send, path, error)
        except ClientGone:
            pass
        except Exception:
            if send.status is not None:
                raise
            logger.exception("Request %s failed.", named)
            await self._refuse(send, path, ApiError(500, "The server failed on this request."))

    async def _get(self, path: str, query: bytes, caller: Caller | None) -> tuple[int, str, bytes]:
        pools = self._pools
        if path in ("/health", "/-/healthz"):
            if not any(pool.engines.healthy() or pool.readiness.scaled_to_zero() for pool in pools.all()):
                raise ApiError(503, "No healthy engine is up.", headers={"retry-after": "5"})
            return 200, "text/plain", b"success"
        if path == "/ready":
            return self._ready(parse_qs(query.decode("latin-1")).get("model", [pools.main.name])[-1])
        if path == "/-/routes":
            return _json({"/": "strata"})
        if path == "/openapi.json":
            return _json(self._routes.document(pools.names(caller)))
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", (await self._metrics(node_only=query == NODE_SCOPE)).encode()
        if path == state.ROUTE:
            return _json(self._state())
        if path == "/v1/models":
            return _json({"object": "list", "data": [pools.card(name) for name in pools.names(caller)]})
        if path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            await pools.require(name, caller)
            return _json(pools.card(name))
        raise self._no_such(path, "GET")

    def _ready(self, name: str) -> tuple[int, str, bytes]:
        """Readiness of a model, of all models of an alias, or of an adapter's. The route needs no key and lists no names."""
        found = self._pools.behind(name)
        if not found and not any(pool.name == name for pool in self._pools.all()):
            raise ApiError(404, "This endpoint has no such model.", param="model")
        obstacles = [pool.readiness.obstacle() for pool in found] or ["The model does not serve yet."]
        if obstacle := next(filter(None, obstacles), None):
            raise ApiError(503, obstacle, headers={"retry-after": "1"})
        return _json({"status": "ready", "model": name})

    async def _refuse(self, send: Send, path: str, error: ApiError) -> None:
        body = errors.body(self._routes.method(path), error)
        await _answer(send, error.status, body, {"content-type": "application/json"} | error.headers)

    def _no_such(self, path: str, method: str) -> ApiError:
        if allowed := "GET" if path in files.table() else self._routes.allowed(path):
            return ApiError(405, f"{method} {path}: only {allowed} is allowed.", headers={"allow": allowed})
        return ApiError(404, f"{method} {path}: there is no such route.")

    def _state(self) -> dict[str, Any]:
        role = "pictures" if self._routes.kind == "pictures" else "decode"
        others = [gateway for gateway in self._gateways.all() if gateway.name != self._name]
        replicas = [(pool.name, role, pool.decode) for pool in self._pools.all()]
        replicas += [(pool.name, "prefill", pool.prefill) for pool in self._pools.all() if pool.prefill is not None]
        return state.state(self._routes.kind, self._pools.names(), replicas, self.totals(), others)

    def totals(self) -> dict[str, float]:
        """Running totals over all models."""
        found = [telemetry.totals() for telemetry in self._telemetries()]
        return {name: sum(totals[name] for totals in found) for name in found[0]}

    def _telemetries(self) -> list[Telemetry]:
        """One for each model: revisions of a model share theirs."""
        return list({id(pool.telemetry): pool.telemetry for pool in self._pools.all()}.values())

    async def _generate(
        self, path: str, named: str, headers: Headers, receive: Receive, send: Send, hold: Hold, journey: Journey
    ) -> None:
        began, caller, telemetry = time.monotonic(), journey.caller, self._pools.main.telemetry
        span = self._tracer.begin(f"POST {path}", tracing.carrier(headers), http__route=path, request_id=named)
        try:
            limit_s, speculate = deadline(headers), speculates(headers)
            body = await _body(headers, receive, hold)
            tree = requests.parse(body)
            target = await self._pools.target(tree, caller)
            pool, journey.model, telemetry = target.pool, target.model, target.pool.telemetry
            cost = self._estimate(tree, len(body), pool)
            salt = self._gate.salt(caller.tenant) if caller is not None and self._gate is not None else None
            prefix = self._prefix(path, tree, salt, target)
            del tree  # parsed, a request takes up to ten times the memory of its bytes
            telemetry.arrived()
            with pool.used(), self._entered(caller, cost, pool) as entry:
                span.child("admission", began, sequences=cost.sequences)
                request = (self._routes, path, body, uuid.uuid4().hex)
                relay = Relay(
                    *request,
                    pool.engines,
                    self.suspects,
                    telemetry,
                    send,
                    hold,
                    prefix=prefix,
                    cache_salt=salt,
                    explain=explained(headers),
                    speculate=speculate,
                    name=named,
                    span=span,
                    model=target.model if target.aliased else None,
                    pool=target.suspects,
                    adapter=target.adapter,
                )
                with self.in_progress.entered(named, headers) as cancelled, journey.measured(entry, relay):
                    left_s = None if limit_s is None else began + limit_s - time.monotonic()
                    status = await self._run(relay, telemetry, entry, receive, cancelled, left_s)
                    prompt, generated = relay.usage or (0, 0)
                    span.end(
                        http__response__status_code=status,
                        gen_ai__usage__input_tokens=prompt,
                        gen_ai__usage__output_tokens=generated,
                    )
        except ApiError as error:
            if isinstance(error, LimitReached) and caller is not None:
                telemetry.tenant_refused(caller.tenant.name, error.limit)
            if error.status in (408, 413, 429, 503):
                telemetry.rejected(_REASONS[error.status])
            status = error.status
            span.end(error=str(error) if status >= 500 else "", http__response__status_code=status)
            await self._refuse(send, path, error)
        except ClientGone:
            telemetry.disconnected()
            span.end(error="the client disconnected")
            status = CLIENT_GONE
        if status != CLIENT_GONE:
            telemetry.request_ended(path, status, time.monotonic() - began)
        if caller is not None:
            telemetry.tenant_answered(caller.tenant.name, status, journey.tokens, journey.first_token_s)

    @contextmanager
    def _entered(self, caller: Caller | None, cost: Estimate, pool: Pool) -> Iterator[Entry | None]:
        if caller is not None and self._gate is not None:
            with self._gate.entered(caller, cost, pool.queue) as entry:
                yield entry
        else:
            with pool.admission.admitted(cost.sequences):
                yield None

    def _estimate(self, tree: dict[str, Any], body_bytes: int, pool: Pool) -> Estimate:
        if not self._routes.times_tokens:
            return Estimate(sequences_of(tree), 0, 0)
        return estimate(tree, body_bytes, pool.context)

    def _prefix(self, path: str, tree: dict[str, Any], salt: str | None, target: Target) -> Prefix | None:
        if target.pool.engines.routing is None:
            return None
        return prefix_of(self._routes.generating[path], tree, target.space, salt or "")

    async def _relay(self, relay: Relay, telemetry: Telemetry, entry: Entry | None) -> None:
        """Runs the relay, after the request's turn in the queue."""
        name = entry.caller.tenant.name if entry is not None else ""
        if entry is not None:
            with telemetry.in_queue(), telemetry.tenant_queued(name):
                await entry.turn()
        with telemetry.in_flight(), telemetry.tenant_running(name) if entry is not None else nullcontext():
            await relay.run()

    async def _run(
        self,
        relay: Relay,
        telemetry: Telemetry,
        entry: Entry | None,
        receive: Receive,
        cancelled: "asyncio.Future[None]",
        limit_s: float | None,
    ) -> int:
        """Run the relay until the response is complete, the client disconnects or cancels, or its deadline has passed. Then free
        what it holds. Returns the status."""
        running = asyncio.ensure_future(self._relay(relay, telemetry, entry))
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

    async def _forward(
        self, method: str, headers: Headers, receive: Receive, hold: Hold, journey: Journey
    ) -> tuple[int, str, bytes]:
        body = await _body(headers, receive, hold)
        target = await self._pools.target(requests.parse(body), journey.caller)
        # An adapter has the tokenizer of its model.
        journey.model, named = target.model, target.aliased or target.adapter is not None
        meta = {"model": target.pool.name if target.adapter is not None else target.model} if named else {}
        if journey.caller is not None and self._gate is not None:
            self._gate.count(journey.caller)
        tried: frozenset[str] = frozenset()
        engines = target.pool.engines
        with target.pool.used():
            await _until_awake(target.pool)
            while len(tried) < TRIES and (peer := engines.least_busy(tried)) is not None and peer.name not in tried:
                try:
                    return await _call(peer, method, body, meta)
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
        peers = [*(peer for pool in self._pools.all() for peer in pool.peers()), *gateways]
        if node_only:
            peers = [peer for peer in peers if peer.entry["node"] == self._node]
        texts = await asyncio.gather(*(_metrics_of(peer) for peer in peers))
        return exposition.merge([({}, text) for text in (self.metrics_text(), *texts)])

    def metrics_text(self) -> str:
        """Metrics of this gateway."""
        return exposition.merge([({}, telemetry.text()) for telemetry in self._telemetries()])


_REASONS = {408: "slow-upload", 413: "too-large", 429: "queue-full", 503: "no-replica"}


async def _until_awake(pool: Pool) -> None:
    """Waits while the pool is at zero. The waiting request brings a replica back."""
    if not pool.readiness.scaled_to_zero():
        return
    ends = time.monotonic() + REPLICA_WAIT_S
    with pool.telemetry.in_queue():
        while pool.engines.least_busy() is None and time.monotonic() < ends:
            await pool.engines.changed(KEEP_ALIVE_S)


async def _call(peer: Peer, method: str, body: bytes, meta: dict[str, Any]) -> tuple[int, str, bytes]:
    call = peer.link.call(method, meta, body)
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
            return (await _call(peer, "metrics", b"", {}))[2].decode()
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


async def _answer(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    sized = {} if status == 304 else {"content-length": str(len(body))}  # a 304 has the length of what it does not send
    encoded = [(name.encode(), value.encode()) for name, value in (headers | sized).items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})
