"""The Ray Serve deployment of gateways: HTTP server, tenants, batches, and the models of the endpoint."""

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from strata.serving.gateway import http, routes
from strata.serving.gateway.app import CANCEL, VERDICT, App
from strata.serving.gateway.keys import FILE, Keys
from strata.serving.metrics import request_log
from strata.serving.ray_patches import serve_ports
from strata.serving.runtime import batching
from strata.serving.runtime import pools as built
from strata.serving.runtime.models import admin as model_admin
from strata.serving.runtime.models.controller import Controller
from strata.serving.runtime.models.followed import FollowedModels
from strata.serving.runtime.replicas import Presence, own_name, own_node
from strata.serving.scaling import reports
from strata.serving.spec import GatewaySpec
from strata.serving.tenants.audit import AuditLog
from strata.serving.tenants.gate import Gate
from strata.serving.transport.directory import Directory
from strata.serving.transport.link import Server
from strata.serving.transport.peers import Peers

METRICS_LOOK_S = 5.0  # gateways need each other only for metrics


class GatewayReplica:
    async def __init__(self, spec: GatewaySpec, *engines: Any) -> None:  # type: ignore[misc]
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
        controller = Controller(spec, name, followed, others, type(self))
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
