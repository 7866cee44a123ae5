"""Starts, warms up, replaces and ends the models of an endpoint, as the catalogue wants them.

Every gateway has a controller; that of the leader works. The catalogue has all of its state, and Ray Serve that of the engines,
so another gateway continues where a leader was killed.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from strata.platform.recipe import ServeSection
from strata.serving.adapters.entry import store as adapter_store
from strata.serving.api.requests import ApiError
from strata.serving.catalogue.document import Catalogue, Model, Revision
from strata.serving.gateway.pool import Pool
from strata.serving.runtime import deployments
from strata.serving.runtime.models.followed import FollowedModels
from strata.serving.runtime.start import failures, warm_up
from strata.serving.runtime.start.progress import DEFAULT_LIMIT_S
from strata.serving.spec import EngineSpec, GatewaySpec, directory_of
from strata.serving.transport.directory import Directory
from strata.serving.transport.link import Kind, LinkLost
from strata.serving.transport.peers import Peer, Peers

logger = logging.getLogger("ray.serve")

LOOK_S = 0.5
DRAIN_LIMIT_S = 3600.0  # for the requests of a revision that was replaced
WARM_UP_S = 300.0
FAILED = "failed to start"  # in a deployment's message after the first failure


class StartFailed(Exception):
    """The reason why a model does not start."""


class Controller:
    def __init__(self, spec: GatewaySpec, gateway: str, followed: FollowedModels, gateways: Peers, replica: type) -> None:
        """`gateway`: the name of this one. `replica`: the class of gateways, to deploy them without the first engines."""
        self._replica = replica
        self._spec, self._name, self._followed, self._gateways = spec, gateway, followed, gateways
        self._working: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._cleared: set[tuple[str, str]] = set()  # revisions that failed and of which nothing is left
        self._controlling = asyncio.get_running_loop().create_task(self._control())

    def leader(self) -> Peer | None:
        """The gateway that changes the catalogue; None: this one."""
        others = [peer for peer in self._gateways.all() if peer.name < self._name]
        return min(others, key=lambda peer: peer.name) if others else None

    async def close(self) -> None:
        """Ends the work, which the next leader continues."""
        self._controlling.cancel()
        for task in self._working.values():
            task.cancel()

    async def _control(self) -> None:
        failing = False
        while True:
            try:
                if self._gateways.discovered and self.leader() is None:
                    await self._look()
                failing = False
            except Exception:  # the GCS or Serve's controller is down: one line per outage
                if not failing:
                    logger.exception("The models cannot be controlled; retrying.")
                failing = True
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        self._followed.apply(await self._followed.store.change(self._newest))
        for name, model in self._followed.catalogue.models.items():
            for revision in model.revisions:
                self._work_on(name, revision)

    def _work_on(self, name: str, revision: Revision) -> None:
        key, work = (name, revision.id), {"starting": self._start, "failed": self._end_failed, "draining": self._drain}
        busy = key in self._working and not self._working[key].done()
        done = revision.state == "ready" or (revision.state == "failed" and key in self._cleared)
        if not busy and not done:
            self._working[key] = asyncio.get_running_loop().create_task(_logged(work[revision.state](name, revision)))

    def _newest(self, stored: Catalogue) -> Catalogue:
        """The stored catalogue; the followed one, if a GCS that was lost came back without it; or that of a new endpoint."""
        if stored.main is not None and stored.version >= self._followed.catalogue.version:
            return stored
        return self._followed.catalogue if self._followed.catalogue.main is not None else self._first(stored)

    def _first(self, before: Catalogue) -> Catalogue:
        """The catalogue of a new endpoint."""
        spec, now = self._spec, time.time()
        main = Model((Revision("", spec.folder, spec.section, "ready", now, adapters=spec.adapters),), main=True)
        first = Catalogue(before.version, {spec.model_id: main})
        for model in spec.models:
            revision = Revision(new_id(), model.folder, model.section, "starting", now, adapters=model.adapters)
            first = first.add(model.name, revision)
        return replace(first, version=before.version + 1)

    async def _start(self, name: str, revision: Revision) -> None:
        try:
            await self._bring_up(name, revision)
            pool = await self._connected(name, revision)
            await _warm_up(pool, ServeSection.model_validate(revision.section).remote_prefill.min_tokens)
            await _carry_over(pool)
        except StartFailed as error:
            reason = str(error)
            logger.warning("The model '%s' does not start: %s", name, reason)
            await self._if_starting(name, revision, lambda now: now.failed(name, revision.id, reason, time.time()))
        else:
            await self._if_starting(name, revision, lambda now: now.ready(name, revision.id, time.time()))

    async def _bring_up(self, name: str, revision: Revision) -> None:
        """Returns when every replica is up. An application that another leader has deployed is not deployed again: Serve would
        restart it."""
        application = deployments.name_of(name, revision.id)
        while True:
            self._check_time(revision, "its replicas are not up")
            deployed = (await _applications()).get(application)
            if deployed is None:
                await asyncio.to_thread(Directory(directory_of(name, revision.id)).clear)
                await asyncio.to_thread(self._deploy, name, revision)
            elif deployed.status == "RUNNING":
                return
            else:
                texts = [deployment.message for deployment in deployed.deployments.values()]
                if deployed.status == "DEPLOY_FAILED" or any(FAILED in text for text in texts):
                    raise StartFailed(_reason([*texts, deployed.message], revision.since))
                await self._progress(name, revision, _progress(deployed))
            if self._state_of(name, revision) != "starting":
                raise StartFailed("it was removed while it started")
            await asyncio.sleep(LOOK_S)

    def _deploy(self, name: str, revision: Revision) -> None:
        from ray import serve

        prefill, decode = engine_specs(self._spec, name, revision)
        forked = self._spec.forked
        started_by: Mapping[str, Any] | None = forked[0] if forked is not None and forked[1] == decode.environment() else None
        target = serve.RunTarget(
            deployments.build_model(prefill, decode, started_by), deployments.name_of(name, revision.id), None
        )
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    async def _connected(self, name: str, revision: Revision) -> Pool:
        """The model's pool, once every one of its roles has a healthy replica."""
        while True:
            pool = self._followed.pool(name, revision.id)
            obstacle = pool.readiness.obstacle() if pool is not None else "It is not connected yet."
            if pool is not None and obstacle is None:
                return pool
            self._check_time(revision, str(obstacle))
            if self._state_of(name, revision) != "starting":
                raise StartFailed("it was removed while it started")
            await asyncio.sleep(LOOK_S)

    def _check_time(self, revision: Revision, obstacle: str) -> None:
        section = ServeSection.model_validate(revision.section)
        limit_s = section.start_timeout_s or DEFAULT_LIMIT_S[section.device]
        if time.time() > revision.since + limit_s:
            raise StartFailed(f"It did not start within {limit_s:.0f} s (serve.start_timeout_s): {obstacle}")

    async def _progress(self, name: str, revision: Revision, words: str) -> None:
        present = self._followed.catalogue.find(name, revision.id)
        if present is not None and present.reason != words:
            await self._if_starting(name, revision, lambda now: now.progress(name, revision.id, words))

    async def _if_starting(self, name: str, revision: Revision, change: Callable[[Catalogue], Catalogue]) -> None:
        """Makes the change, unless the revision was removed meanwhile."""

        def checked(now: Catalogue) -> Catalogue:
            present = now.find(name, revision.id)
            return change(now) if present is not None and present.state == "starting" else now

        self._followed.apply(await self._followed.store.change(checked))

    def _state_of(self, name: str, revision: Revision) -> str:
        present = self._followed.catalogue.find(name, revision.id)
        return "ended" if present is None else present.state

    async def _end_failed(self, name: str, revision: Revision) -> None:
        """Ends what is left of a start that failed. The revision stays in the catalogue with its reason."""
        await self._delete(name, revision)
        self._cleared.add((name, revision.id))

    async def _drain(self, name: str, revision: Revision) -> None:
        """Ends a revision after its last request. Gateways that have read the catalogue send it no new ones."""
        deadline = time.monotonic() + DRAIN_LIMIT_S
        while not self._idle(name, revision) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
        await self._delete(name, revision)
        left = await self._followed.store.change(lambda now: _ended(now, name, revision))
        self._followed.apply(left)
        if name not in left.models:
            await asyncio.to_thread(Directory(adapter_store(directory_of(name, revision.origin))).clear)

    def _idle(self, name: str, revision: Revision) -> bool:
        key = directory_of(name, revision.id)
        loads = [self._followed.load(), *(peer.link.load for peer in self._gateways.all() if peer.name != self._name)]
        return all(load.get("catalogue", 0) >= revision.version and not load.get("pools", {}).get(key) for load in loads)

    async def _delete(self, name: str, revision: Revision) -> None:
        """Ends the engines of a revision. Returns when they are gone."""
        from ray import serve

        application = deployments.name_of(name, revision.id)
        if not revision.id:  # in the application of the gateways, which stay
            alone = deployments.gateways(self._replica, self._spec, self._most_nodes()).bind(self._spec)
            target = serve.RunTarget(alone, deployments.NAME, None)
            if len((await _applications())[deployments.NAME].deployments) > 1:
                await asyncio.to_thread(
                    serve.run_many, [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
                )
            return
        while (deployed := (await _applications()).get(application)) is not None:
            if deployed.status != "DELETING":
                await asyncio.to_thread(serve.delete, application, False)
            await asyncio.sleep(LOOK_S)

    def _most_nodes(self) -> int:
        section = ServeSection.model_validate(self._spec.section)
        return section.prefill.most + section.decode.most


def new_id() -> str:
    """Id of a revision: two of one model never share a directory or an application."""
    return secrets.token_hex(4)


def engine_specs(endpoint_spec: GatewaySpec, name: str, revision: Revision) -> tuple[EngineSpec, EngineSpec]:
    """Specs of the prefill and the decode engines."""
    section, folder = ServeSection.model_validate(revision.section), Path(revision.folder)
    network, apart = endpoint_spec.network, endpoint_spec.on_every_node
    prefill = EngineSpec.of("prefill", section, folder, name, network, revision.id)
    decode = EngineSpec.of("decode", section, folder, name, network, revision.id)
    shared: dict[str, Any] = {"on_own_nodes": apart, "origin": revision.origin}
    return replace(prefill, **shared), replace(decode, **shared)


async def _applications() -> Mapping[str, Any]:
    from ray import serve

    found: Mapping[str, Any] = (await asyncio.to_thread(serve.status)).applications
    return found


def _progress(deployed: Any) -> str:
    parts = []
    for name, deployment in deployed.deployments.items():
        states = {str(state): count for state, count in deployment.replica_states.items()}
        parts.append(f"{states.get('RUNNING', 0)} of {sum(states.values())} {name}")
    return ", ".join(parts) + " up" if parts else ""


def _reason(texts: list[str], since: float) -> str:
    cause = failures.named_cause(texts) or failures.named_cause(failures.engine_logs(since))
    return cause or " ".join(" ".join(texts).split())[-500:]


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        logger.warning("The work on a model is repeated.", exc_info=True)


def _ended(now: Catalogue, name: str, revision: Revision) -> Catalogue:
    return now.ended(name, revision.id) if now.find(name, revision.id) is not None else now


async def _warm_up(pool: Pool, long: int) -> None:
    """Sends prompts to each replica that answers requests. Some models fail only with their first answer; prompts long enough for
    a remote prefill, of `long` tokens, also connect the engines of both pools."""
    for peer in pool.decode.all():
        tokens = min(long, peer.entry["context"] - 1)
        for token in range(warm_up.REQUESTS):
            path, request = warm_up.first_request(peer.entry["able"], token, tokens)
            try:
                async with asyncio.timeout(WARM_UP_S):
                    await _answered(peer, path.rpartition("/")[2], {"model": pool.name} | request)
            except (LinkLost, TimeoutError) as error:
                raise StartFailed(f"A replica was lost in the warm-up: {error or 'no answer in time'}") from None


async def _carry_over(pool: Pool) -> None:
    """Loads the model's adapters on new weights, which may have other shapes."""
    if pool.adapters is not None:
        try:
            await pool.adapters.load_all()
        except ApiError as error:
            raise StartFailed(f"{error} Remove the adapter first, or use other weights.") from None


async def _answered(peer: Peer, method: str, request: dict[str, Any]) -> None:
    call = peer.link.call(method, {"request_id": secrets.token_hex(16)}, json.dumps(request).encode())
    status, text = 200, b""
    try:
        while True:
            kind, payload = await call.next()
            if kind == Kind.HEAD:
                status = json.loads(payload)["status"]
            elif kind == Kind.DATA:
                text = payload
            else:
                break
    finally:
        call.cancel()
    if status != 200:
        raise StartFailed(f"The warm-up got HTTP {status}: {text[:300].decode(errors='replace')}")
