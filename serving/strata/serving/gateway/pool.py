"""The models of a gateway, and the engines of each: connections, choice of a replica, admission, readiness and metrics."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from strata.serving.adapters.api import Change, done
from strata.serving.adapters.entry import Entry as Adapter
from strata.serving.adapters.registry import Adapters
from strata.serving.api.requests import ApiError
from strata.serving.catalogue import alias
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.prefix_routing import PrefixRouting
from strata.serving.gateway.readiness import Readiness
from strata.serving.gateway.standby import Engines
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.tenants.queue import FairQueue
from strata.serving.tenants.tenant import Caller
from strata.serving.transport.peers import Peer, Peers


class Pool:
    def __init__(
        self,
        names: tuple[str, ...],
        decode: Peers,
        prefill: Peers | None,
        admission: Admission,
        telemetry: Telemetry,
        readiness: Readiness | None = None,
        routing: PrefixRouting | None = None,
        queue: FairQueue | None = None,
        key: str = "",
        adapters: Adapters | None = None,
    ) -> None:
        """`names` of the model in the API, the first one for answers. `queue`: of tenants' requests; None: the gate's own. `key`
        is of one revision of the model's weights, empty for the first one of the main model."""
        self.names, self.key, self.adapters = names, key, adapters
        self.decode, self.prefill = decode, prefill
        self.engines = Engines(decode, prefill, routing)
        self.readiness = readiness or Readiness(decode, prefill)
        self.admission, self.telemetry, self.queue = admission, telemetry, queue
        self.requests = 0  # in progress, from the choice of this pool on
        self._began = int(time.time())

    @property
    def name(self) -> str:
        return self.names[0]

    def peers(self) -> list[Peer]:
        return [*self.decode.all(), *(self.prefill.all() if self.prefill is not None else [])]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Counts a request: a pool that is replaced ends after its last one."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    @property
    def context(self) -> int | None:
        """Tokens of a prompt and its answer, where the model has them and a replica is up."""
        peer = self.engines.least_busy()
        return peer.entry.get("context") if peer is not None else None

    def card(self, name: str) -> dict[str, Any]:
        """Entry of `GET /v1/models`."""
        card = {"id": name, "object": "model", "created": self._began, "owned_by": "strata"}
        return card if self.context is None else card | {"max_model_len": self.context}

    def adapter_card(self, adapter: Adapter) -> dict[str, Any]:
        return self.card(adapter.name) | {"created": int(adapter.added) or self._began, "parent": self.name}

    def close(self) -> None:
        if self.adapters is not None:
            self.adapters.close()
        for peers in (self.decode, self.prefill):
            if peers is not None:
                peers.close()


@dataclass(frozen=True)
class Target:
    """Engines for a request, chosen once: its failover stays on them."""

    pool: Pool
    model: str
    aliased: bool  # the request names an alias of the model
    adapter: Adapter | None = None  # which `model` names

    @property
    def space(self) -> str:
        """Name space of cached prefixes."""
        return self.model if self.adapter is None else self.adapter.engine_name

    @property
    def suspects(self) -> str:
        """Engines and weights by which a request is judged that crashes them."""
        return self.pool.key if self.adapter is None else f"{self.pool.key}/{self.adapter.engine_name}"


class Pools:
    """Models by name. Without a catalogue there is the main model only."""

    def __init__(self, main: Pool, refresh: Callable[[], Awaitable[None]] | None = None) -> None:
        """`refresh` reads the catalogue again, for a name that is not known yet."""
        self._refresh = refresh
        self.set(main, {}, {}, ())

    def set(
        self, main: Pool, others: Mapping[str, Pool], aliases: Mapping[str, Mapping[str, float]], unnamed: tuple[Pool, ...]
    ) -> None:
        """`unnamed`: pools that get no new requests, because they start or end."""
        self.main, self.aliases = main, aliases
        self._named = dict.fromkeys(main.names, main) | dict(others)
        self._all = tuple({id(pool): pool for pool in (*self._named.values(), *unnamed)}.values())

    def all(self) -> tuple[Pool, ...]:
        return self._all

    def names(self, caller: Caller | None = None) -> tuple[str, ...]:
        """Models, aliases and adapters that a caller may use."""
        return tuple(name for name in (*self._named, *self.aliases, *self.adapters()) if self._allowed(name, caller))

    def card(self, name: str) -> dict[str, Any]:
        """Entry of `GET /v1/models`; that of an alias names its model with the largest weight as `root`."""
        if name in self._named:
            return self._named[name].card(name)
        if name not in self.aliases:
            pool, adapter = self.adapters()[name]
            return pool.adapter_card(adapter)
        weights = self.aliases[name]
        model = max(weights, key=lambda each: weights[each])
        return self._named[model].card(name) | {"root": model}

    async def target(self, tree: Mapping[str, Any], caller: Caller | None) -> Target:
        """Engines for a request, whose tenant may use them. Raises a 403 or a 404."""
        asked = tree.get("model")
        if asked is None:
            asked = self.main.name
        if self._refresh is not None and not self._known(asked):
            await self._refresh()
        found = None if self._known(asked) else await self._adapter(asked)
        if not self._known(asked) and found is None:
            raise self._unknown(asked, caller)
        if not self._allowed(asked, caller):
            assert caller is not None
            raise ApiError(403, f"The tenant '{caller.tenant.name}' may not use the model '{asked}'.", param="model")
        if found is not None:
            return Target(found[0], asked, aliased=False, adapter=found[1])
        if asked in self._named:
            return Target(self._named[asked], asked, aliased=False)
        user = tree.get("user")
        model = alias.choose(asked, self.aliases[asked], user if isinstance(user, str) else None)
        return Target(self._named[model], model, aliased=True)

    def behind(self, name: str) -> tuple[Pool, ...]:
        """Pools that answer requests to a model, an alias or an adapter; none for an unknown name."""
        if name in self.aliases:
            return tuple(self._named[model] for model in self.aliases[name])
        if name in self._named:
            return (self._named[name],)
        found = self.adapters().get(name)
        return () if found is None else (found[0],)

    async def require(self, name: str, caller: Caller | None) -> None:
        if not (self._known(name) or await self._adapter(name)) or not self._allowed(name, caller):
            raise self._unknown(name, caller)

    async def change_adapter(self, change: Change) -> str:
        """Adds or removes an adapter. Returns the text of the answer."""
        if change.folder is None:
            found = await self._adapter(change.name)
            pool = found[0] if found is not None else self.main
        else:
            pool = self.main if change.model is None else self._named.get(change.model, self.main)
            if change.model is not None and change.model not in self._named:
                raise self._unknown(change.model, None)
            elsewhere = self.adapters().get(change.name)
            if self._known(change.name) or (elsewhere is not None and elsewhere[0] is not pool):
                raise ApiError(400, f"'{change.name}' is the name of a model, or of another model's adapter.", param="lora_name")
        if pool.adapters is None:
            raise ApiError(400, f"The model '{pool.name}' was started without adapters. Set serve.adapters={{}} in its recipe.")
        if change.folder is None:
            await pool.adapters.remove(change.name)
        else:
            await pool.adapters.add(change.name, change.folder, change.replace)
        return done(change)

    def adapters(self) -> dict[str, tuple[Pool, Adapter]]:
        """Adapters of all models that get new requests."""
        pools = dict.fromkeys(self._named.values())
        return {each.name: (pool, each) for pool in pools if pool.adapters is not None for each in pool.adapters.all()}

    async def _adapter(self, name: Any) -> tuple[Pool, Adapter] | None:
        """An adapter, also one that another gateway added a moment ago."""
        if not isinstance(name, str):
            return None
        for pool in dict.fromkeys(self._named.values()):
            if pool.adapters is not None and (found := pool.adapters.get(name)) is not None:
                return pool, found
        for pool in dict.fromkeys(self._named.values()):
            if pool.adapters is not None and (found := await pool.adapters.find(name)) is not None:
                return pool, found
        return None

    def _known(self, name: Any) -> bool:
        return isinstance(name, str) and (name in self._named or name in self.aliases)

    def _allowed(self, name: str, caller: Caller | None) -> bool:
        return caller is None or caller.tenant.may_use(name)

    def _unknown(self, name: Any, caller: Caller | None) -> ApiError:
        served = " and ".join(f"'{model}'" for model in self.names(caller)) or "none to you"
        return ApiError(404, f"The model '{name}' does not exist; this endpoint serves {served}.", param="model")
