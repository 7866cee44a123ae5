"""Bringing the endpoint up, keeping it up until it is told to stop, and taking it down without a trace."""

import asyncio
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from strata.platform import ports
from strata.platform.errors import UserError
from strata.platform.hardware.machine import available_memory
from strata.platform.ray_cluster import cluster
from strata.platform.recipe import ServeSection
from strata.serving import access, mps
from strata.serving.fork_server import server
from strata.serving.gateway import keys
from strata.serving.models import hybrid_check, model_dir
from strata.serving.runtime.start_progress import DEFAULT_LIMIT_S, LOOK_S, Say, StartProgress, shown
from strata.serving.spec import EngineSpec, GatewaySpec, Network
from strata.serving.transport.directory import Directory

WARM_UP = 3  # as many hand-overs as it takes to know their rate
# In messages about a process that ended: they name no reason.
OF_A_DEAD_PROCESS = (
    "Engine core initialization failed",
    "ActorDiedError",
    "RayActorError",
    "EngineDeadError",
    "Traceback (most recent call last)",  # Serve wraps another error's whole traceback into a RuntimeError
)
WARM_S = 120.0  # an import of vLLM takes 10 s, and many times that on a machine that is busy
SPARE_CPUS = 16  # a number for Ray's books: engines take what cores there are
PROCESS_GIB = 1.5  # a CPU engine's two processes before any weights: Python, torch, vLLM


@dataclass(frozen=True)
class Endpoint:
    url: str
    model: str
    phases: dict[str, float]  # where the seconds of the start went


def check(section: ServeSection, folder: Path) -> None:
    """Everything that can be known before a process starts."""
    access.require_safe(section)
    model_dir.check(folder)
    if section.prefill.replicas > 0:
        hybrid_check.check_folder(folder)
    ports.require_free(section.port, section.host, "serve.port")
    if section.device == "cpu":
        engines = section.prefill.most + section.decode.most
        needed = engines * (PROCESS_GIB + section.kv_cache_gib + 2 * model_dir.weights_gib(folder))
        free = available_memory() / 2**30
        if free < needed:
            raise UserError(
                f"Serving this model needs about {needed:.1f} GiB of memory; {free:.1f} are free.",
                "Close something, serve a smaller model, or lower serve.kv_cache_gib.",
            )


@contextmanager
def running(section: ServeSection, folder: Path, model_id: str, say: Say = lambda line: None) -> Iterator[Endpoint]:
    """`say` gets a line every few seconds in which it starts."""
    check(section, folder)
    with ports.claim(section.port, section.host, "serve.port"), _running(section, folder, model_id, say) as endpoint:
        yield endpoint


@contextmanager
def _running(section: ServeSection, folder: Path, model_id: str, say: Say) -> Iterator[Endpoint]:
    from ray import serve

    from strata.serving.runtime import app, deployment

    began = psutil.Process().create_time()
    phases = {"this command": time.time() - began}
    network = Network.within(one_machine="RAY_ADDRESS" not in os.environ)
    keys_file = access.keys_file()
    gateway = replace(GatewaySpec.of(section, model_id, network), keys_file=str(keys_file) if keys_file else None)
    prefill = EngineSpec.of("prefill", section, folder, model_id, network)
    decode = EngineSpec.of("decode", section, folder, model_id, network)
    cpus = math.ceil(prefill.cpus() + decode.cpus())
    # Engines have an environment of their own, for which Ray starts new processes: idle ones started ahead are of no use.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # The import of vLLM begins when Ray is up: beside it, a busy machine might not start Ray within Ray's own time limit.
    with mps.running(section), cluster.connected(cpus, SPARE_CPUS) as ends_with_us, _warm(section, decode) as warm:
        phases["Ray"] = _since(began, phases)
        limit_s = section.start_timeout_s or DEFAULT_LIMIT_S[section.device]
        start = StartProgress(limit_s, say, lambda: _logs(began), _describe)
        # Clients talk to our gateways, so Serve needs no proxy.
        start.during(
            "starting Ray Serve", lambda: serve.start(proxy_location="Disabled", controller_options=deployment.CONTROLLER)
        )
        phases["Serve"] = _since(began, phases)
        if app.NAME in serve.status().applications:
            raise UserError("This Ray cluster serves a Strata endpoint already.", "Stop that one first, or use another cluster.")
        directory = Directory(model_id)
        directory.clear()
        try:
            url = ports.url(section.host, section.port)
            if warm is not None:
                start.during("importing vLLM", lambda: warm.wait(WARM_S))
            started_by = warm.runtime_env if warm else None
            start.during("waiting for the engines", lambda: _deploy(app.build(gateway, prefill, decode, started_by), began))
            roles = ("decode", "prefill") if section.prefill.replicas else ("decode",)
            # Serve replaces one that died since.
            replicas = start.during("waiting for the engines", lambda: _replicas(directory, roles))
            tokens = min(section.remote_prefill.min_tokens, *(entry["context"] - 1 for entry in replicas["decode"]))
            start.during("waiting for a first answer", lambda: _warm_up(url, model_id, tokens, start, began))
            every = [entry["phases"] for entries in replicas.values() for entry in entries]
            slowest = max(every, key=lambda seconds: sum(seconds.values()))
            phases |= {"replica process": slowest["process"], "import vLLM": slowest["imports"], "engine": slowest["engine"]}
            phases["first answer"] = _since(began, phases)
            yield Endpoint(url, model_id, phases)
        finally:
            if not ends_with_us:
                _leave()


def _warm(section: ServeSection, decode: EngineSpec) -> AbstractContextManager[server.Warm | None]:
    """A process that forks the engines, where they run on this machine and without a GPU, whose state a fork would share."""
    if section.device == "cpu" and "RAY_ADDRESS" not in os.environ:
        return server.running(decode.environment())
    return nullcontext()


def _replicas(directory: Directory, roles: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """What the replicas published, as soon as there is one of each role."""

    async def look(role: str) -> list[dict[str, Any]]:
        found = [await directory.entry(role, name) for name in await directory.names(role)]
        return [entry for entry in found if entry is not None]

    while True:
        found = {role: asyncio.run(look(role)) for role in roles}
        if all(found.values()):
            return found
        time.sleep(LOOK_S)


def _describe() -> str:
    """Which replicas are up, and Serve's word on those that are not."""
    from ray import serve

    from strata.serving.runtime.app import NAME

    deployments = serve.status().applications[NAME].deployments
    parts = [f"{states.get('RUNNING', 0)} of {sum(states.values())} {name}" for name, states in _states(deployments).items()]
    words = [deployment.message for deployment in deployments.values() if deployment.message]
    return ", ".join(parts) + " up" + (f" ({' '.join(words)[:300]})" if words else "")


def _states(deployments: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    return {name: {str(state): count for state, count in one.replica_states.items()} for name, one in deployments.items()}


def _leave() -> None:
    """A cluster that stays: our application goes, and Serve with it (and its port) unless it serves someone else too."""
    from ray import serve

    from strata.serving.runtime.app import NAME

    try:
        serve.delete(NAME)
    except TimeoutError:
        raise UserError("The endpoint's replicas did not end in time.", "End the cluster: strata cluster stop.") from None
    if not serve.status().applications:
        serve.shutdown()


def _since(began: float, phases: dict[str, float]) -> float:
    return time.time() - began - sum(phases.values())


def _deploy(application: Any, began: float) -> None:
    from strata.serving.runtime import deployment

    try:
        deployment.bring_up(application)
    except RuntimeError as error:
        raise _refused(str(error), began) from None


def _warm_up(url: str, model_id: str, tokens: int, start: StartProgress, began: float) -> None:
    """There are models whose engine starts and fails only with its first answer. Answers to prompts long enough to leave also
    make the two engines shake hands, which the first user would otherwise wait for, and show what a hand-over takes without."""
    with httpx.Client(base_url=url, headers=access.headers_for(url)) as client:
        for token in range(WARM_UP):  # another one each time, for what an engine has cached does not leave it
            request = {"model": model_id, "prompt": [token] * max(tokens, 1), "max_tokens": 1}
            while (failure := _answered(client, request, start)) is not None:
                if not failure.again:
                    raise _refused(failure.reason, began)
                time.sleep(LOOK_S)


@dataclass(frozen=True)
class _Failure:
    reason: str
    again: bool  # a replica died, which Serve replaces: another request may be answered


def _answered(client: httpx.Client, request: dict[str, Any], start: StartProgress) -> _Failure | None:
    try:
        response = client.post("/v1/completions", json=request, timeout=start.left_s + LOOK_S)
    except httpx.TransportError as error:
        return _Failure(str(error), again=True)
    if response.status_code == 401:
        file = os.environ.get(keys.FILE)
        raise UserError(
            f"The endpoint does not know the API key that this command sent: {access.KEY} is not in {file}.",
            f"Unset {access.KEY}, or add it to {file}.",
        )
    if response.is_success:
        return None
    return _Failure(f"HTTP {response.status_code}: {response.text[:500]}", again=response.status_code in (429, 502, 503))


def _refused(failure: str, began: float) -> UserError:
    cause = _cause(failure, began)
    if cause is None:
        return UserError(
            f"An engine ended while it started: {_ending(failure)}{shown(_logs(began))}",
            "Start it again. If it was killed for memory, close something or lower serve.kv_cache_gib; see 'strata doctor'.",
        )
    return UserError(f"vLLM cannot serve this model: {cause}", "Mend the model folder or the recipe's serve section.")


def _ending(failure: str) -> str:
    """vLLM names the process and its exit code, a signal's as a negative number. Else the last lines: Ray's and Serve's messages
    go on for pages."""
    for text in (*_statuses(), failure):
        if ended := re.search(r"Failed core proc\(s\): \{'(\w+)': (-?\d+)\}", text):
            process, code = ended.groups()
            return f"{process} " + (f"was killed by signal {code[1:]}." if code.startswith("-") else f"exited with code {code}.")
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    return " ".join(lines[-2:])[:500]


def _cause(failure: str, began: float) -> str | None:
    """Serve says only that a deployment failed; the reason is in its status, or, if it was the engine's own process
    that ended, in that process's log. None: no exception of its own is named anywhere, as when it was killed."""
    for text in (*_engine_logs(began), *_statuses(), failure):
        errors = re.findall(r"\b\w+(?:Error|Exception): .+(?:\n {2}\S.*)*", text)  # pydantic goes on in indented lines
        told = [" ".join(error.split()) for error in errors if not any(word in error for word in OF_A_DEAD_PROCESS)]
        if told:
            return told[-1][:500]
    return None


def _statuses() -> list[str]:
    from ray import serve

    return [d.message for application in serve.status().applications.values() for d in application.deployments.values()]


def _engine_logs(began: float) -> list[str]:
    texts = [path.read_text(errors="replace") for path in _logs(began)]
    return ["\n".join(line for line in text.splitlines() if "EngineCore" in line) for text in texts]


def _logs(began: float) -> list[Path]:
    """Those that Ray's workers of this machine wrote since, the newest last: a cluster that stays keeps older endpoints' too."""
    import ray

    node = ray._private.worker._global_node
    if node is None:  # the cluster is gone
        return []
    changed = {path: path.stat() for path in Path(node.get_logs_dir_path()).glob("worker-*.???")}
    return sorted(
        (path for path, stat in changed.items() if stat.st_mtime >= began and stat.st_size),
        key=lambda path: changed[path].st_mtime,
    )
