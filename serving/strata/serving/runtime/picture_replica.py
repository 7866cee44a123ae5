"""Ray Serve deployment of a picture model: a replica with its group of workers, and the application around it."""

import asyncio
from functools import partial
from typing import Any

from ray import serve
from ray.serve import Application

from strata.serving.diffusion.replica.spec import PicturesSpec
from strata.serving.ray_patches import serve_logs, serve_ports
from strata.serving.runtime.deployments import DRAIN_S, START_FAILURES, gateways
from strata.serving.runtime.gateway_replica import GatewayReplica
from strata.serving.runtime.replicas import Phases, Presence, own_name, own_node
from strata.serving.spec import GatewaySpec
from strata.serving.transport.directory import Directory
from strata.serving.transport.link import Server

ROLE = "pictures"


class PicturesReplica:
    _presence: Presence | None = None  # None during the start

    async def __init__(self, spec: PicturesSpec, start_s: float) -> None:  # type: ignore[misc]  # Serve awaits it
        from strata.serving.diffusion.replica.calls import PictureCalls
        from strata.serving.diffusion.replica.engine import Engine
        from strata.serving.diffusion.replica.worker_group import start
        from strata.serving.metrics.telemetry import Pictures as Telemetry

        serve_ports.listen_on(spec.network.host)
        serve_logs.keep_open()
        phases = Phases()
        phases.done("process")
        name, section = own_name(), spec.section
        telemetry = Telemetry(spec.model_id, name)
        start_group = partial(asyncio.to_thread, start, spec, start_s, asyncio.get_running_loop())
        self._engine = Engine(start_group, telemetry, section.max_batch, section.batch_wait_ms / 1000)
        await self._engine.begin()
        phases.done("workers")
        calls = PictureCalls(self._engine, section, telemetry.text)
        server = Server(calls.handle, lambda: self._load(server), spec.network.secret)
        self._presence = Presence(Directory(spec.model_id), ROLE, name, server, spec.network.host, own_node())
        await self._presence.begin({"phases": phases.seconds})

    def _load(self, server: Server) -> dict[str, Any]:
        """Load and health, sent to callers with every ping."""
        return {"calls": server.calls, "healthy": self._engine.healthy} | self._engine.load()

    async def check_health(self) -> None:
        self._engine.check_health()

    async def __del__(self) -> None:
        """Waits for the requests in progress, then ends the workers."""
        if self._presence is not None:
            await self._presence.end()
        await self._engine.end()


def build(gateway: GatewaySpec, spec: PicturesSpec, start_s: float) -> Application:
    replicas: Any = serve.deployment(
        PicturesReplica,
        name=ROLE,
        num_replicas=spec.section.replicas,
        ray_actor_options=spec.resources() | {"runtime_env": {"env_vars": spec.environment()}},
        max_constructor_retry_count=START_FAILURES,
        health_check_period_s=1,
        graceful_shutdown_timeout_s=DRAIN_S,
    )
    return gateways(GatewayReplica, gateway, spec.section.replicas).bind(gateway, replicas.bind(spec, start_s))
