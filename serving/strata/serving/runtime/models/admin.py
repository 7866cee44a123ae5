"""The gateway's end of the admin API of models: checks what is added, and passes changes to the leader."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError
from strata.platform.recipe import ServeSection
from strata.serving.adapters import recipe as adapter_recipe
from strata.serving.api.requests import ApiError
from strata.serving.catalogue.admin import Admin
from strata.serving.catalogue.document import Revision
from strata.serving.runtime.models import checks
from strata.serving.runtime.models.controller import Controller, engine_specs, new_id
from strata.serving.runtime.models.followed import FollowedModels
from strata.serving.spec import GatewaySpec
from strata.serving.transport.link import Call, LinkLost

CALL = "models"  # call between gateways: a request of the admin API, for the leader
FIXED = "The main model is of a RayService, which updates it without a failed request: change its recipe or model there."


class ModelAdmin:
    def __init__(self, spec: GatewaySpec, followed: FollowedModels, controller: Controller) -> None:
        self._spec, self._followed, self._controller = spec, followed, controller
        fixed = FIXED if spec.on_every_node else None
        self._admin = Admin(followed.store, self._prepare, fixed, lambda: followed.pools.adapters())

    async def handle(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Raises ApiError."""
        leader = self._controller.leader()
        if leader is None:
            status, tree = await self._admin.handle(method, path, body)
            await self._followed.refresh()
            return status, json.dumps(tree).encode()
        call = leader.link.call(CALL, {"method": method, "path": path}, body)
        try:
            _, head = await call.next()
            _, answer = await call.next()
            await call.next()
        except LinkLost:
            raise ApiError(503, "The gateway that changes models is lost. Try again.", headers={"retry-after": "2"}) from None
        finally:
            call.cancel()
        await self._followed.refresh()
        return json.loads(head)["status"], answer

    async def answer(self, call: Call) -> None:
        """Handles the call of another gateway."""
        try:
            status, tree = await self._admin.handle(call.meta["method"], call.meta["path"], call.body)
        except ApiError as error:
            status, tree = error.status, error.body
        call.head({"status": status, "type": "application/json"})
        call.data(json.dumps(tree).encode())
        call.end({})

    def _prepare(self, name: str, folder: str, changes: dict[str, Any], section: dict[str, Any]) -> Revision:
        import ray

        try:
            own = ServeSection.model_validate(section).further(changes)
        except ValueError as error:
            raise ApiError(400, f"serve.{error}", param="serve") from None
        revision = Revision(new_id(), folder, own.model_dump(mode="json", exclude={"models"}), "starting", time.time())
        try:
            checks.check_folder(own, Path(folder))
            taken = {name, *self._followed.pools.names()}
            revision = replace(revision, adapters=adapter_recipe.entries(own, Path(folder), taken))
            if own.device == "cpu" and self._spec.network.host is not None:  # the engines are on this machine
                checks.check_memory(checks.memory_gib(own, Path(folder)))
            checks.check_resources(engine_specs(self._spec, name, revision), ray.available_resources())
        except UserError as error:
            raise ApiError(400, f"{error.cause} {error.fix}") from None
        return revision
