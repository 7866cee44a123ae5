"""The three Ray Serve deployments: prefill, decode and gateway replicas.

The driver imports this module, so vLLM is imported only in the replica. Requests do not pass through Serve, whose request path
costs a hundred microseconds per token. Serve places, starts, monitors, scales and replaces the replicas. They find each other in
the directory and communicate over links.
"""

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from strata.serving.adapters.entry import store
from strata.serving.adapters.following import Following
from strata.serving.metrics import request_log
from strata.serving.ray_patches import serve_logs, serve_ports
from strata.serving.runtime.autoscaling import PREFILLS
from strata.serving.scaling import reports
from strata.serving.scaling.serve_policy import EngineReport
from strata.serving.spec import EngineSpec, GatewaySpec
from strata.serving.transport.directory import Directory
from strata.serving.transport.link import Server
from strata.serving.transport.peers import Peers

PUBLISH_S = 10.0
METRICS_LOOK_S = 5.0  # gateways need each other only for metrics
# Within Serve's graceful_shutdown_timeout_s. Streams that have not ended by then continue on another replica.
DRAIN_LOOK_S = 0.2


class Phases:
    """Durations of the phases of a replica's start: process, imports, engine."""

    def __init__(self) -> None:
        self._last = psutil.Process().create_time()
        self.seconds: dict[str, float] = {}

    def done(self, phase: str) -> None:
        now = time.time()
        self.seconds[phase] = now - self._last
        self._last = now


@dataclass
class Presence:
    """Registration of a replica in the directory, and its server for calls."""

    directory: Directory
    role: str
    name: str
    server: Server
    host: str | None
    node: str
    publishing: asyncio.Task[None] | None = None

    async def begin(self, entry: dict[str, Any]) -> None:
        entry = entry | {"node": self.node, "address": await self.server.listen(self.host or _node_address())}
        await self.directory.publish(self.role, self.name, entry)
        self.publishing = asyncio.get_running_loop().create_task(self._publish_repeatedly(entry))

    async def _publish_repeatedly(self, entry: dict[str, Any]) -> None:
        """Publishes again, because a caller that could not reach this replica removes its entry."""
        while True:
            await asyncio.sleep(PUBLISH_S)
            await self.directory.publish(self.role, self.name, entry)

    async def end(self) -> None:
        """Withdraws the entry and waits for the calls in progress."""
        if self.publishing is not None:
            self.publishing.cancel()
        await self.directory.withdraw(self.role, self.name)
        while self.server.calls:
            await asyncio.sleep(DRAIN_LOOK_S)
        self.server.close()


def own_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def own_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _import_engine() -> Any:
    from strata.serving.engine import engine

    return engine


class _EngineReplica:
    """Base of prefill and decode replicas: the engine, its health check and its load."""

    _capacity: int  # concurrent calls at a load of 1.0
    _presence: Presence | None = None  # None during the start
    _adapters: Following | None = None

    async def _start(self, spec: EngineSpec, name: str) -> Any:
        """Starts the engine. Returns the module that imports vLLM."""
        serve_ports.listen_on(spec.network.host)
        self._phases = Phases()
        self._phases.done("process")
        serve_logs.keep_open()
        request_log.install()
        # In a thread, so that the replica can answer Serve's messages during the import.
        engine = await asyncio.to_thread(_import_engine)
        self._phases.done("imports")
        self._engine = await engine.start(spec, name, spec.network.host or _node_address())
        self._phases.done("engine")
        if self._engine.lora is not None:
            self._adapters = Following(Directory(store(spec.directory)), self._engine.lora.loaded)
            await self._adapters.begin()
        return engine

    async def check_health(self) -> None:
        await self._engine.check_health()

    def _load(self, server: Server) -> dict[str, Any]:
        """Load and health, sent to callers with every ping."""
        return {"calls": server.calls, "healthy": self._engine.healthy, **self._engine.load()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        if self._presence is None:
            return {"load": 0.0}
        report: EngineReport = self._engine.report(sum(self._phases.seconds.values()))
        return {"load": self._presence.server.calls / self._capacity} | vars(report)

    async def __del__(self) -> None:
        if self._adapters is not None:
            self._adapters.end()
        if self._presence is not None:
            await self._presence.end()


class PrefillReplica(_EngineReplica):
    async def __init__(self, spec: EngineSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        name = own_name()
        engine = await self._start(spec, name)
        calls = engine.prefill_calls(self._engine, spec)
        server = Server(calls.handle, lambda: self._load(server) | {"queued_tokens": calls.queued_tokens}, spec.network.secret)
        self._capacity = PREFILLS
        self._presence = Presence(Directory(spec.directory), "prefill", name, server, spec.network.host, own_node())
        await self._presence.begin({"phases": self._phases.seconds, "context": self._engine.context})


class DecodeReplica(_EngineReplica):
    async def __init__(self, spec: EngineSpec, *prefill: Any) -> None:  # type: ignore[misc]
        """`prefill`: the pool's deployment, where this one is the first of an application."""
        name = own_name()
        engine = await self._start(spec, name)
        directory = Directory(spec.directory)
        pool = Peers(directory, "prefill", spec.network.secret) if spec.disaggregated else None
        calls = engine.decode_calls(self._engine, spec, pool)
        server = Server(calls.handle, lambda: self._load(server), spec.network.secret)
        self._capacity = spec.max_sequences
        self._presence = Presence(directory, "decode", name, server, spec.network.host, own_node())
        entry = {"phases": self._phases.seconds, "context": self._engine.context, "able": calls.able}
        await self._presence.begin(entry)


class GatewayReplica:
    async def __init__(self, spec: GatewaySpec, *engines: Any) -> None:  # type: ignore[misc]
        from strata.serving.gateway import http, routes
        from strata.serving.gateway.app import CANCEL, VERDICT, App
        from strata.serving.gateway.keys import FILE, Keys
        from strata.serving.runtime import batching
        from strata.serving.runtime import pools as built
        from strata.serving.runtime.models import admin as model_admin
        from strata.serving.runtime.models.controller import Controller
        from strata.serving.runtime.models.followed import FollowedModels
        from strata.serving.tenants.audit import AuditLog
        from strata.serving.tenants.gate import Gate

        serve_ports.listen_on(spec.network.host)
        request_log.install()
        name, node = own_name(), own_node()
        directory = Directory(spec.model_id)
        main = built.main(spec, name)
        others = Peers(directory, "gateway", spec.network.secret, poll_s=METRICS_LOOK_S)
        keys = Keys(Path(os.environ[FILE]), spec.network.secret) if FILE in os.environ else None
        self._at_end: list[Callable[[], Awaitable[None]]] = []

        def of_others(what: str) -> dict[str, Any]:
            """A part of the other gateways' loads, as of their last pongs."""
            return {peer.name: peer.link.load[what] for peer in others.all() if peer.name != name and what in peer.link.load}

        gate = None
        if keys is not None:
            gate = Gate(
                slots=lambda: spec.slots(len(main.decode.all())),
                max_queue=spec.max_queue,
                secret=spec.network.secret,
                lend_idle=keys.lend_idle,
                others=lambda: of_others("tenants"),
                other_queues=lambda: of_others("queues"),
            )
            # Apart from the endpoint's own entries, which a new start clears.
            spent = Directory(f"{spec.model_id}.tenants")
            self._syncing = asyncio.get_running_loop().create_task(gate.spending.sync_forever(spent, name))
            self._at_end.append(lambda: gate.spending.sync(spent, name))
        audit = AuditLog(Path(spec.audit_log), name) if spec.audit_log else None
        if audit is not None:
            self._at_end.append(lambda: asyncio.to_thread(audit.close))
        own = routes.PICTURES if spec.role == "pictures" else routes.TEXT
        followed = FollowedModels(spec, name, main, gate)
        controller = Controller(spec, name, followed, others)
        self._at_end.append(controller.close)
        changes = model_admin.ModelAdmin(spec, followed, controller)
        of_text = changes.handle if own is routes.TEXT else None
        api = batching.api(spec) if own is routes.TEXT else None
        app = App(name, followed.pools, others, keys, node, own, gate, audit, of_text, api)
        batches = batching.executor(spec, app, keys, followed.pools, others, name) if api is not None else None
        self._batches = batches
        self._spec, self._pools = spec, followed.pools

        async def answer(call: Any) -> None:
            """Handles calls of other gateways."""
            if call.method == VERDICT:
                app.suspects.record(**call.meta)
                call.end({})
                return
            if call.method == model_admin.CALL:
                await changes.answer(call)
                return
            if call.method == CANCEL:
                call.end({"found": app.in_progress.cancel(**call.meta)})
                return
            call.head({"status": 200, "type": "text/plain"})
            call.data(app.metrics_text().encode())
            call.end({})

        def load() -> dict[str, Any]:
            """Counters for other gateways, sent with every pong."""
            tenants = {"tenants": gate.load(), "queues": gate.queue_load()} if gate is not None else {}
            running = {batching.RUNNING: batches.slots.running} if batches is not None else {}
            return app.totals() | followed.load() | running | tenants

        await followed.refresh()  # before the first request, which may be for new weights of the main model
        server = Server(answer, load, spec.network.secret)
        self._presence = Presence(directory, "gateway", name, server, spec.network.host, node)
        await self._presence.begin({})
        loop, demand = asyncio.get_running_loop(), main.telemetry.demand
        self._reporting = loop.create_task(reports.publish_repeatedly(directory, name, demand)) if spec.by_slo else None
        self._http = http.server(app)
        self._serving = asyncio.get_running_loop().create_task(self._http.serve(sockets=[http.listen(spec.host, spec.port)]))
        if batches is not None:
            batches.start()
        gc.freeze()  # objects of the start are permanent; the garbage collector need not scan them while streams wait

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The wanted number of gateways: `spec.gateways` per node with engines."""
        nodes = {peer.entry["node"] for pool in self._pools.all() for peer in pool.peers()}
        return {"wanted": float(len(nodes) * self._spec.gateways)}

    async def check_health(self) -> None:
        if self._serving.done():
            raise RuntimeError("The HTTP server ended.")

    async def __del__(self) -> None:
        """Stops uvicorn, which accepts no new connections and waits for the responses in progress."""
        if self._batches is not None:
            await self._batches.stop()
        self._http.should_exit = True
        await self._serving
        if self._reporting is not None:
            self._reporting.cancel()
        await self._presence.end()
        for finish in self._at_end:
            await finish()
