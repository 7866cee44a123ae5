"""A gateway's pools, as the catalogue has the models."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from strata.platform.recipe import ServeSection
from strata.serving.catalogue.document import Catalogue, Revision
from strata.serving.catalogue.store import Store
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.runtime import pools as built
from strata.serving.scaling import reports
from strata.serving.spec import GatewaySpec, directory_of
from strata.serving.tenants.gate import Gate
from strata.serving.transport.directory import Directory

logger = logging.getLogger("ray.serve")

POLL_S = 0.5
REFRESH_S = 0.1  # names that clients make up cause at most one read in this time

Key = tuple[str, str]  # name of a model, id of a revision


class FollowedModels:
    def __init__(self, spec: GatewaySpec, gateway: str, main: Pool, gate: Gate | None) -> None:
        self._spec, self._gateway, self._gate, self._main = spec, gateway, gate, main
        self.store = Store(spec.model_id)
        self.catalogue = Catalogue()
        self.pools = Pools(main, self.refresh)
        self._built: dict[Key, Pool] = {}
        self._telemetries = {spec.model_id: main.telemetry}
        self._reporting: dict[Key, asyncio.Task[None]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._read_at = float("-inf")
        self._following = asyncio.get_running_loop().create_task(self._follow())

    def pool(self, name: str, id: str) -> Pool | None:
        return self._built.get((name, id))

    def load(self) -> dict[str, object]:
        """The version of the catalogue that this gateway follows, and its requests in progress by pool."""
        requests = {directory_of(*key): pool.requests for key, pool in self._built.items() if pool.requests}
        return {"catalogue": self.catalogue.version, "pools": requests}

    async def refresh(self) -> None:
        """Reads the catalogue. Concurrent callers share one read."""
        loop = asyncio.get_running_loop()
        if self._reading is None or self._reading.done():
            if loop.time() < self._read_at + REFRESH_S:
                return
            self._reading = loop.create_task(self._read())
        await asyncio.shield(self._reading)

    async def _follow(self) -> None:
        failing = False
        while True:
            try:
                await self.refresh()
                failing = False
            except Exception:  # the GCS is down: one line per outage, and the models stay
                if not failing:
                    logger.exception("The catalogue of models cannot be read; retrying.")
                failing = True
            await asyncio.sleep(POLL_S)

    async def _read(self) -> None:
        found = await self.store.read()
        self._read_at = asyncio.get_running_loop().time()
        if found is not None and found.main is not None:
            self.apply(found)

    def apply(self, catalogue: Catalogue) -> None:
        """Follows a catalogue, unless a newer one is followed already."""
        if catalogue.version <= self.catalogue.version:
            return
        self.catalogue = catalogue
        wanted = {
            (name, one.id): one
            for name, model in catalogue.models.items()
            for one in model.in_state("starting", "ready", "draining")
        }
        for key in self._built.keys() - wanted.keys():
            self._close(key)
        for key, each in wanted.items():
            if key not in self._built:
                self._built[key] = self._build(key[0], each)
        self._telemetries = {name: each for name, each in self._telemetries.items() if name in catalogue.models}
        serving = {
            name: self._built[name, revision.id]
            for name, model in catalogue.models.items()
            if (revision := model.serving) is not None
        }
        main = serving[self._spec.model_id]
        others = {name: pool for name, pool in serving.items() if name != self._spec.model_id}
        aliases = {alias: weights for alias, weights in catalogue.aliases.items() if weights.keys() <= serving.keys()}
        self.pools.set(main, others, aliases, tuple(self._built.values()))

    def _build(self, name: str, revision: Revision) -> Pool:
        if name == self._spec.model_id and not revision.id:
            return self._main
        telemetry = self._telemetries.setdefault(name, Telemetry(name, self._gateway, main=False))
        spec = gateway_spec(self._spec, name, revision)
        if spec.by_slo:
            publishing = reports.publish_repeatedly(Directory(directory_of(name, revision.id)), self._gateway, telemetry.demand)
            self._reporting[name, revision.id] = asyncio.get_running_loop().create_task(publishing)
        return built.build(spec, revision.id, telemetry, self._gate, revision.origin)

    def _close(self, key: Key) -> None:
        pool = self._built.pop(key)
        pool.close()
        if self._gate is not None:
            self._gate.close_queue(pool.key)
        if (reporting := self._reporting.pop(key, None)) is not None:
            reporting.cancel()


def gateway_spec(endpoint: GatewaySpec, name: str, revision: Revision) -> GatewaySpec:
    """A gateway's settings for one revision of a model."""
    section = ServeSection.model_validate(revision.section)
    own = GatewaySpec.of(section, name, endpoint.network)
    adapters = revision.adapters
    return replace(own, folder=str(Path(revision.folder)), on_every_node=endpoint.on_every_node, adapters=adapters)
