"""The two deployments. Thin on purpose: the driver imports this file, so vLLM is imported inside, in the replica."""

import asyncio
import time
from typing import Any

import psutil

from strata.serving.spec import EngineSpec


class _Phases:
    """When this replica's process began, had its imports and had its engine: where the seconds of a start went."""

    def __init__(self) -> None:
        self._last = psutil.Process().create_time()
        self.seconds: dict[str, float] = {}

    def done(self, phase: str) -> None:
        now = time.time()
        self.seconds[phase] = now - self._last
        self._last = now


async def _start(spec: EngineSpec, phases: _Phases) -> Any:
    phases.done("process")
    # In a thread, for Serve's own messages to this replica go on meanwhile.
    engine = await asyncio.to_thread(_import_engine)
    phases.done("imports")
    server = await engine.start(spec)
    phases.done("engine")
    return server


def _import_engine() -> Any:
    from strata.serving import engine

    return engine


class PrefillReplica:
    async def __init__(self, spec: EngineSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        phases = _Phases()
        self._server = await _start(spec, phases)
        self._phases = phases

    async def prefill(self, method: str, request: Any) -> Any:
        """One token is generated and thrown away; what counts is in the response's kv_transfer_params."""
        async for response in await getattr(self._server, method)(request):
            return response

    async def start_phases(self) -> dict[str, float]:
        return self._phases.seconds

    async def check_health(self) -> None:
        await self._server.check_health()


class DecodeReplica:
    """Serves HTTP itself: `app.py` wraps it with `serve.ingress()`, which asks for the ASGI app once this is built."""

    async def __init__(self, spec: EngineSpec, prefill_pool: Any) -> None:  # type: ignore[misc]
        phases = _Phases()
        self._spec = spec
        self._prefill_pool = prefill_pool
        self._server = await _start(spec, phases)
        self._phases = phases

    async def __serve_build_asgi_app__(self) -> Any:
        from strata.serving import api

        context = self._server.engine._engine_client.model_config.max_model_len
        return api.build(self._server, self._prefill_pool, self._spec.model_id, context)

    async def start_phases(self) -> dict[str, dict[str, float]]:
        return {"prefill": await self._prefill_pool.start_phases.remote(), "decode": self._phases.seconds}

    async def check_health(self) -> None:
        await self._server.check_health()
