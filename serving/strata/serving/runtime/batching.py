"""Files and batches of a gateway replica."""

import json
from pathlib import Path

from strata.serving.api.requests import ApiError
from strata.serving.batches import in_process, slots
from strata.serving.batches.api import Api, Limits
from strata.serving.batches.executor import Executor
from strata.serving.batches.in_process import Answered
from strata.serving.batches.meter import Meter
from strata.serving.batches.slots import Slots
from strata.serving.batches.store import COMMON
from strata.serving.gateway.app import App
from strata.serving.gateway.keys import Keys
from strata.serving.gateway.pool import Pools
from strata.serving.spec import GatewaySpec
from strata.serving.tenants.tenant import Caller
from strata.serving.transport.peers import Peers

RUNNING = "batch_sequences"  # entry of a gateway's load: sequences that it runs for batches


def api(spec: GatewaySpec) -> Api:
    limits = Limits(spec.files.file_mib * 2**20, spec.files.tenant_gib * 2**30)
    return Api(Path(spec.files.folder) if spec.files.folder is not None else None, limits)


def executor(spec: GatewaySpec, app: App, keys: Keys | None, pools: Pools, others: Peers, name: str) -> Executor | None:
    """Executor of the batches in the gateways' folder; None without one. Batches of every model run in idle slots of the main
    one: on one machine, all models share its cores."""
    if spec.files.folder is None:
        return None

    def free() -> int:
        engines = pools.main.decode.all()
        elsewhere = sum(peer.link.load.get(RUNNING, 0) for peer in others.all() if peer.name != name)
        return slots.idle(spec.slots(len(engines)), sum(peer.busy for peer in engines), idle.running + elsewhere)

    async def ask(space: str, path: str, body: bytes, request: str) -> Answered:
        caller = None
        if space != COMMON:
            tenant = keys.tenant(space) if keys is not None else None
            if tenant is None:
                error = ApiError(401, f"The tenant '{space}' has no valid key any more.")
                return Answered(401, json.dumps(error.body).encode())
            caller = Caller(tenant, "batch", background=True)
        return await in_process.post(app, path, body, request, caller)

    idle = Slots(free)
    return Executor(Path(spec.files.folder), ask, idle, Meter(pools.main.telemetry))
