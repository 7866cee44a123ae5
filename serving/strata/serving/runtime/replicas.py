"""The Ray Serve deployments with engines: prefill and decode replicas.

The driver imports this module, so vLLM is imported only in the replica. Requests do not pass through Serve, whose request path
costs a hundred microseconds per token. Serve places, starts, monitors, scales and replaces the replicas. They find each other in
the directory and communicate over links.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import psutil

from strata.serving.adapters.following import Following
from strata.serving.metrics import request_log
from strata.serving.ray_patches import serve_logs, serve_ports
from strata.serving.runtime.autoscaling import PREFILLS
from strata.serving.scaling.serve_policy import EngineReport
from strata.serving.spec import EngineSpec
from strata.serving.transport.directory import Directory
from strata.serving.transport.link import Server
from strata.serving.transport.peers import Peers

PUBLISH_S = 10.0
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
            self._adapters = Following(Directory(spec.adapters_directory), self._engine.lora.loaded)
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
