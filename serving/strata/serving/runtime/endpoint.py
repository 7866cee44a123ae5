"""Life of an endpoint on a Ray cluster: checks, start, warm-up, and a stop that leaves no process behind."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from strata.platform import ports
from strata.platform.errors import UserError
from strata.platform.ray_cluster import cluster
from strata.platform.recipe import ServeSection
from strata.serving import access, client, mps
from strata.serving.adapters import recipe as adapter_recipe
from strata.serving.adapters.entry import store as adapter_store
from strata.serving.catalogue import store
from strata.serving.fork_server import server
from strata.serving.gateway import readiness
from strata.serving.runtime import watch
from strata.serving.runtime.models import checks, from_recipe
from strata.serving.runtime.start import failures, warm_up
from strata.serving.runtime.start.progress import DEFAULT_LIMIT_S, LOOK_S, Report, StartProgress, shown
from strata.serving.spec import EngineSpec, FurtherModel, GatewaySpec, Network
from strata.serving.speculation import draft
from strata.serving.transport.directory import Directory

if TYPE_CHECKING:
    import openai

WARM_S = 120.0  # an import of vLLM takes 10 s, and many times that on a machine that is busy
SPARE_CPUS = 16  # for Ray's bookkeeping only: engines use the cores that the machine has


@dataclass(frozen=True)
class Endpoint:
    """A running endpoint: its address, its model's name, and the seconds that each phase of the start took."""

    url: str
    model: str
    phases: Mapping[str, float]
    wanted: Mapping[str, int] = field(repr=False, default_factory=dict)  # replicas by role

    def client(self) -> "openai.OpenAI":
        """An official `openai` client of this endpoint, with the API key that this machine has for it."""
        return client.connect(self.url)

    def wait(self, report: Report = lambda line: None) -> None:
        """Blocks while the endpoint lives, and reports lost and replaced replicas. Raises UserError when it is lost for good."""
        watch.until_lost(self.url, self.model, self.wanted, report)


def check(section: ServeSection, folder: Path) -> None:
    """Raises UserError for every problem that can be found before a process starts."""
    access.require_safe(section)
    checks.check_folder(section, folder)
    adapter_recipe.entries(section, folder, ())
    ports.require_free(section.port, section.host, "serve.port")
    if section.device == "cpu":
        checks.check_memory(checks.memory_gib(section, folder))


@contextmanager
def running(
    section: ServeSection, folder: Path, model_id: str, report: Report = lambda line: None, began: float | None = None
) -> Iterator[Endpoint]:
    """Yields the endpoint once it is ready, and stops it after the block. `report` receives a progress line every few seconds of
    the start. Phases are counted from `began`, a Unix time: the start of the command, by default now."""
    began = time.time() if began is None else began
    section = draft.resolved(section)
    check(section, folder)
    models = from_recipe.chosen(section, model_id)
    claimed = ports.claim(section.port, section.host, "serve.port")
    with claimed, _running(section, folder, model_id, models, report, began) as endpoint:
        yield endpoint


@contextmanager
def _running(
    section: ServeSection, folder: Path, model_id: str, models: Sequence[FurtherModel], report: Report, began: float
) -> Iterator[Endpoint]:
    from ray import serve

    from strata.serving.runtime import app
    from strata.serving.runtime.deployments import NAME
    from strata.serving.runtime.start.deploy import CONTROLLER

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it logs each step of the start
    phases = {"this command": time.time() - began}
    network = Network.within(one_machine="RAY_ADDRESS" not in os.environ)
    keys_file = access.keys_file()
    gateway = replace(
        GatewaySpec.of(section, model_id, network),
        keys_file=str(keys_file) if keys_file else None,
        warm_up=True,
        folder=str(folder.resolve()),
        models=tuple(models),
    )
    gateway = replace(gateway, adapters=adapter_recipe.entries(section, folder, gateway.names))
    prefill = EngineSpec.of("prefill", section, folder, model_id, network)
    decode = EngineSpec.of("decode", section, folder, model_id, network)
    cpus = math.ceil(prefill.cpus() + decode.cpus() + from_recipe.cpus(models))
    # Ray starts new processes for the engines' own environment: idle workers that it starts ahead are of no use.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # The import of vLLM begins when Ray is up: beside it, a busy machine might not start Ray within Ray's own time limit.
    with mps.running(section), cluster.connected(cpus, SPARE_CPUS) as ends_with_us, _warm(section, decode) as warm:
        phases["Ray"] = since(began, phases)
        limit_s = section.start_timeout_s or DEFAULT_LIMIT_S[section.device]
        start = StartProgress(limit_s, report, lambda: failures.logs(began), describe)
        # Clients connect to Strata's gateways, so Serve needs no proxy.
        start.during("starting Ray Serve", lambda: serve.start(proxy_location="Disabled", controller_options=CONTROLLER))
        phases["Serve"] = since(began, phases)
        if NAME in serve.status().applications:
            raise UserError("This Ray cluster serves a Strata endpoint already.", "Stop that one first, or use another cluster.")
        directory = Directory(model_id)
        directory.clear()
        store.directory(model_id).clear()
        Directory(adapter_store(model_id)).clear()
        try:
            url = ports.url(section.host, section.port)
            if warm is not None:
                start.during("importing vLLM", lambda: warm.wait(WARM_S))
            started_by = warm.runtime_env if warm else None
            gateway = replace(gateway, forked=(warm.runtime_env, decode.environment()) if warm else None)
            start.during("waiting for the engines", lambda: _deploy(app.build(gateway, prefill, decode, started_by), began))
            roles = ("decode", "prefill") if section.prefill.replicas else ("decode",)
            # Serve replaces a replica that died since.
            replicas = start.during("waiting for the engines", lambda: published(directory, roles))
            tokens = min(section.remote_prefill.min_tokens, *(entry["context"] - 1 for entry in replicas["decode"]))
            able = replicas["decode"][0]["able"]
            start.during("waiting for a first answer", lambda: _warm_up(url, network, model_id, able, tokens, start, began))
            every = [entry["phases"] for entries in replicas.values() for entry in entries]
            slowest = max(every, key=lambda seconds: sum(seconds.values()))
            phases |= {"replica process": slowest["process"], "import vLLM": slowest["imports"], "engine": slowest["engine"]}
            phases["first answer"] = since(began, phases)
            asyncio.run(readiness.publish_warm_up(directory))
            start.during("waiting for /ready", lambda: client.wait_until_ready(url, limit_s=start.left_s))
            if models:
                start.during("waiting for the other models", lambda: from_recipe.wait(model_id))
            yield Endpoint(url, model_id, phases, watch.wanted(section))
        finally:
            if not ends_with_us:
                leave()


def _warm(section: ServeSection, decode: EngineSpec) -> AbstractContextManager[server.Warm | None]:
    """The fork server of the engines. Only on this machine and without a GPU, whose state a fork would share."""
    if section.device == "cpu" and "RAY_ADDRESS" not in os.environ:
        return server.running(decode.environment())
    return nullcontext()


def published(directory: Directory, roles: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The directory entries of the replicas, once there is at least one of each role."""

    async def look(role: str) -> list[dict[str, Any]]:
        found = [await directory.entry(role, name) for name in await directory.names(role)]
        return [entry for entry in found if entry is not None]

    while True:
        found = {role: asyncio.run(look(role)) for role in roles}
        if all(found.values()):
            return found
        time.sleep(LOOK_S)


def describe() -> str:
    """The replicas that are up, and Serve's messages about the others."""
    from ray import serve

    from strata.serving.runtime.deployments import NAME

    deployments = serve.status().applications[NAME].deployments
    parts = [f"{states.get('RUNNING', 0)} of {sum(states.values())} {name}" for name, states in _states(deployments).items()]
    words = [deployment.message for deployment in deployments.values() if deployment.message]
    return ", ".join(parts) + " up" + (f" ({' '.join(words)[:300]})" if words else "")


def _states(deployments: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    return {name: {str(state): count for state, count in one.replica_states.items()} for name, one in deployments.items()}


def leave() -> None:
    """Deletes the applications on a cluster that stays, and shuts Serve down unless it serves another one."""
    from ray import serve

    from strata.serving.runtime.deployments import is_ours

    delete()
    for application in [name for name in serve.status().applications if is_ours(name)]:  # of further models
        serve.delete(application)
    if not serve.status().applications:
        serve.shutdown()


def delete() -> None:
    """Deletes the application. Its replicas answer the requests in progress first."""
    from ray import serve

    from strata.serving.runtime.deployments import NAME

    try:
        serve.delete(NAME)
    except TimeoutError:
        raise UserError("The endpoint's replicas did not end in time.", "End the cluster: strata cluster stop.") from None


def since(began: float, phases: dict[str, float]) -> float:
    return time.time() - began - sum(phases.values())


def _deploy(application: Any, began: float) -> None:
    from strata.serving.runtime.start import deploy

    try:
        deploy.bring_up(application)
    except RuntimeError as error:
        raise _refused(str(error), began) from None


def _warm_up(
    url: str, network: Network, model_id: str, able: Sequence[str], tokens: int, start: StartProgress, began: float
) -> None:
    """Sends prompts until each is answered. Some models fail only with their first answer. Prompts long enough for a remote
    prefill also connect the two engines, which the first user would otherwise wait for, and measure an idle KV transfer."""
    with httpx.Client(base_url=url, headers=access.starter_headers(network.secret)) as http:
        for token in range(warm_up.REQUESTS):  # another prompt each time, since a cached one is not transferred
            path, request = warm_up.first_request(able, token, tokens)
            while (failure := answered(http, path, {"model": model_id} | request, start)) is not None:
                if not failure.again:
                    raise _refused(failure.reason, began)
                time.sleep(LOOK_S)


@dataclass(frozen=True)
class Failure:
    reason: str
    again: bool  # worth another request, since Serve replaces a replica that died


def answered(http: httpx.Client, path: str, request: dict[str, Any], start: StartProgress) -> Failure | None:
    try:
        response = http.post(path, json=request, timeout=start.left_s + LOOK_S)
    except httpx.TransportError as error:
        return Failure(str(error), again=True)
    if response.is_success:
        return None
    return Failure(f"HTTP {response.status_code}: {response.text[:500]}", again=response.status_code in (429, 502, 503))


def _refused(failure: str, began: float) -> UserError:
    cause = failures.cause_of(failure, began)
    if cause is None:
        return UserError(
            f"An engine ended while it started: {failures.ending(failure)}{shown(failures.logs(began))}",
            "Start it again. If it was killed for memory, close something or lower serve.kv_cache_gib; see 'strata doctor'.",
        )
    return UserError(f"vLLM cannot serve this model: {cause}", "Mend the model folder or the recipe's serve section.")
