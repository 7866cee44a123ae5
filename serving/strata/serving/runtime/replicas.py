"""The three deployments. Thin on purpose: the driver imports this file, so vLLM is imported inside, in the replica.

Requests do not pass through Serve: it places, starts, watches, scales and replaces replicas, which find each other in the
directory and talk over links. Serve's own request path costs a hundred microseconds a token.
"""

import asyncio
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from strata.serving.ray_patches import serve_logs, serve_ports
from strata.serving.runtime.autoscaling import PREFILLS
from strata.serving.spec import EngineSpec, GatewaySpec
from strata.serving.transport.directory import Directory
from strata.serving.transport.link import Server
from strata.serving.transport.peers import Peers

PUBLISH_S = 10.0
METRICS_LOOK_S = 5.0  # gateways need each other for nothing but their numbers
# Within Serve's graceful_shutdown_timeout_s; what has not ended by then is continued elsewhere.
DRAIN_LOOK_S = 0.2


class _Phases:
    """When this replica's process began, had its imports and had its engine: where the seconds of a start went."""

    def __init__(self) -> None:
        self._last = psutil.Process().create_time()
        self.seconds: dict[str, float] = {}

    def done(self, phase: str) -> None:
        now = time.time()
        self.seconds[phase] = now - self._last
        self._last = now


@dataclass
class _Presence:
    """A replica's listed address, and the calls that come to it."""

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
        self.publishing = asyncio.get_running_loop().create_task(self._publish_for_ever(entry))

    async def _publish_for_ever(self, entry: dict[str, Any]) -> None:
        """A caller that could not reach this replica for a moment struck it off the list."""
        while True:
            await asyncio.sleep(PUBLISH_S)
            await self.directory.publish(self.role, self.name, entry)

    async def end(self) -> None:
        """No new calls; those under way are finished first."""
        if self.publishing is not None:
            self.publishing.cancel()
        await self.directory.withdraw(self.role, self.name)
        while self.server.calls:
            await asyncio.sleep(DRAIN_LOOK_S)
        self.server.close()


def _own_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _own_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _import_engine() -> Any:
    from strata.serving.engine import engine

    return engine


class _EngineReplica:
    """What the two kinds share: an engine, and Serve's questions about it."""

    _full: int  # calls that fill it
    _presence: _Presence | None = None  # until it is up

    async def _start(self, spec: EngineSpec, name: str) -> Any:
        """Returns the module that knows vLLM."""
        serve_ports.listen_on(spec.network.host)
        self._phases = _Phases()
        self._phases.done("process")
        serve_logs.keep_open()
        # In a thread, for Serve's own messages to this replica go on meanwhile.
        engine = await asyncio.to_thread(_import_engine)
        self._phases.done("imports")
        self._engine = await engine.start(spec, name, spec.network.host or _node_address())
        self._phases.done("engine")
        return engine

    async def check_health(self) -> None:
        await self._engine.check_health()

    def _load(self, server: Server) -> dict[str, Any]:
        """What callers learn with every ping."""
        return {"calls": server.calls, "healthy": self._engine.healthy}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"load": self._presence.server.calls / self._full if self._presence is not None else 0.0}

    async def __del__(self) -> None:
        if self._presence is not None:
            await self._presence.end()


class PrefillReplica(_EngineReplica):
    async def __init__(self, spec: EngineSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        name = _own_name()
        engine = await self._start(spec, name)
        calls = engine.prefill_calls(self._engine, spec)
        server = Server(calls.handle, lambda: self._load(server) | {"queued_tokens": calls.queued_tokens}, spec.network.secret)
        self._full = PREFILLS
        self._presence = _Presence(Directory(spec.model_id), "prefill", name, server, spec.network.host, _own_node())
        await self._presence.begin({"phases": self._phases.seconds, "context": self._engine.context})


class DecodeReplica(_EngineReplica):
    async def __init__(self, spec: EngineSpec) -> None:  # type: ignore[misc]
        name = _own_name()
        engine = await self._start(spec, name)
        directory = Directory(spec.model_id)
        pool = Peers(directory, "prefill", spec.network.secret) if spec.disaggregated else None
        calls = engine.decode_calls(self._engine, spec, pool)
        server = Server(calls.handle, lambda: self._load(server), spec.network.secret)
        self._full = spec.max_sequences
        self._presence = _Presence(directory, "decode", name, server, spec.network.host, _own_node())
        await self._presence.begin({"phases": self._phases.seconds, "context": self._engine.context})


class GatewayReplica:
    async def __init__(self, spec: GatewaySpec, *engines: Any) -> None:  # type: ignore[misc]
        from strata.serving.gateway import http
        from strata.serving.gateway.admission import Admission
        from strata.serving.gateway.app import VERDICT, App
        from strata.serving.gateway.keys import FILE, Keys
        from strata.serving.metrics.telemetry import Gateway as Telemetry

        serve_ports.listen_on(spec.network.host)
        name, node = _own_name(), _own_node()
        directory = Directory(spec.model_id)
        decode = Peers(directory, "decode", spec.network.secret)
        prefill = Peers(directory, "prefill", spec.network.secret) if spec.disaggregated else None
        admission = Admission(lambda: spec.capacity(len(decode.all())) - sum(peer.link.elsewhere for peer in decode.all()))
        telemetry = Telemetry(spec.model_id, name)
        others = Peers(directory, "gateway", spec.network.secret, look_s=METRICS_LOOK_S)
        keys = Keys(Path(os.environ[FILE])) if FILE in os.environ else None
        app = App(name, spec.model_id, decode, prefill, others, admission, telemetry, keys, node)
        self._spec, self._engines = spec, [decode] if prefill is None else [decode, prefill]

        async def answer(call: Any) -> None:
            """Other gateways' calls."""
            if call.method == VERDICT:
                app.suspects.hear(**call.meta)
                call.end({})
                return
            call.head({"status": 200, "type": "text/plain"})
            call.data(telemetry.text().encode())
            call.end({})

        self._presence = _Presence(directory, "gateway", name, Server(answer, dict, spec.network.secret), spec.network.host, node)
        await self._presence.begin({})
        self._http = http.server(app)
        self._serving = asyncio.get_running_loop().create_task(self._http.serve(sockets=[http.listen(spec.host, spec.port)]))
        gc.freeze()  # what is here by now stays: collecting garbage need not look through it while streams wait

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Gateways there should be: so many on each node that has engines."""
        nodes = {peer.entry["node"] for peers in self._engines for peer in peers.all()}
        return {"wanted": float(len(nodes) * self._spec.gateways)}

    async def check_health(self) -> None:
        if self._serving.done():
            raise RuntimeError("The HTTP server ended.")

    async def __del__(self) -> None:
        """uvicorn takes no new connections and waits for the answers under way."""
        self._http.should_exit = True
        await self._serving
        await self._presence.end()
