"""Bringing the endpoint up, keeping it up until it is told to stop, and taking it down without a trace."""

import asyncio
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from strata.platform import cluster, ports
from strata.platform.errors import UserError
from strata.platform.machine import available_memory
from strata.platform.recipe import ServeSection
from strata.serving import kinds_of_cache, model_dir, mps
from strata.serving.directory import Directory
from strata.serving.spec import EngineSpec, GatewaySpec, Network
from strata.serving.warm import server

WARM_UP = 3  # as many hand-overs as it takes to know their rate
WARM_S = 120.0  # an import of vLLM takes 10 s, and many times that on a machine that is busy
PROCESS_GIB = 1.5  # a CPU engine's two processes before any weights: Python, torch, vLLM


@dataclass(frozen=True)
class Endpoint:
    url: str
    model: str
    phases: dict[str, float]  # where the seconds of the start went


def check(section: ServeSection, folder: Path) -> None:
    """Everything that can be known before a process starts."""
    model_dir.check(folder)
    if section.prefill.replicas > 0:
        kinds_of_cache.check_folder(folder)
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
def running(section: ServeSection, folder: Path, model_id: str) -> Iterator[Endpoint]:
    check(section, folder)
    from ray import serve

    from strata.serving import app, deployment

    began = psutil.Process().create_time()
    phases = {"this command": time.time() - began}
    network = Network.within(one_machine="RAY_ADDRESS" not in os.environ)
    gateway = GatewaySpec.of(section, model_id, network)
    prefill = EngineSpec.of("prefill", section, folder, model_id, network)
    decode = EngineSpec.of("decode", section, folder, model_id, network)
    cpus = math.ceil(prefill.cpus() + decode.cpus())
    # The import of vLLM begins when Ray is up: beside it, a busy machine might not start Ray within Ray's own time limit.
    with mps.running(section), cluster.connected(cpus) as ends_with_us, _warm(section, decode) as warm:
        phases["Ray"] = _since(began, phases)
        # Clients talk to our gateways, so Serve needs no proxy.
        serve.start(proxy_location="Disabled", controller_options=deployment.CONTROLLER)
        phases["Serve"] = _since(began, phases)
        if app.NAME in serve.status().applications:
            raise UserError("This Ray cluster serves a Strata endpoint already.", "Stop that one first, or use another cluster.")
        directory = Directory(model_id)
        directory.clear()
        try:
            url = f"http://{section.host}:{section.port}"
            if warm is not None:
                warm.wait(WARM_S)
            _deploy(app.build(gateway, prefill, decode, warm.runtime_env if warm else None))
            replicas = _replicas(directory)
            _warm_up(
                url, model_id, min(section.remote_prefill.min_tokens, *(entry["context"] - 1 for entry in replicas["decode"]))
            )
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


def _replicas(directory: Directory) -> dict[str, list[dict[str, Any]]]:
    async def look(role: str) -> list[dict[str, Any]]:
        found = [await directory.entry(role, name) for name in await directory.names(role)]
        return [entry for entry in found if entry is not None]

    return {role: asyncio.run(look(role)) for role in ("decode", "prefill")}


def _leave() -> None:
    """A cluster that stays: our application goes, and Serve with it (and its port) unless it serves someone else too."""
    from ray import serve

    from strata.serving.app import NAME

    serve.delete(NAME)
    if not serve.status().applications:
        serve.shutdown()


def _since(began: float, phases: dict[str, float]) -> float:
    return time.time() - began - sum(phases.values())


def _deploy(application: Any) -> None:
    from strata.serving import deployment

    try:
        deployment.bring_up(application)
    except RuntimeError as error:
        raise _refused(error) from None


def _warm_up(url: str, model_id: str, tokens: int) -> None:
    """There are models whose engine starts and fails only with its first answer. Answers to prompts long enough to leave also
    make the two engines shake hands, which the first user would otherwise wait for, and show what a hand-over takes without."""
    try:
        for token in range(WARM_UP):  # another one each time, for what an engine has cached does not leave it
            request = {"model": model_id, "prompt": [token] * max(tokens, 1), "max_tokens": 1}
            httpx.post(f"{url}/v1/completions", json=request, timeout=120).raise_for_status()
    except httpx.HTTPError as error:
        raise _refused(error) from None


def _refused(error: Exception) -> UserError:
    return UserError(
        f"vLLM cannot serve this model: {_cause(str(error))}", "Mend the model folder or the recipe's serve section."
    )


def _cause(failure: str) -> str:
    """Serve says only that a deployment failed; the reason is in its status, or, if it was the engine's own process
    that ended, in that process's log."""
    from ray import serve

    statuses = [d.message for application in serve.status().applications.values() for d in application.deployments.values()]
    for text in (*_engine_logs(), *statuses, failure):
        errors = re.findall(r"\b\w+(?:Error|Exception): .+(?:\n {2}\S.*)*", text)  # pydantic goes on in indented lines
        told = [" ".join(error.split()) for error in errors if "Engine core initialization failed" not in error]
        if told:
            return told[-1][:500]
    return failure[:500]


def _engine_logs() -> list[str]:
    import ray

    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = [path.read_text(errors="replace") for path in logs.glob("worker-*.???")]
    return ["\n".join(line for line in text.splitlines() if "EngineCore" in line) for text in texts]
