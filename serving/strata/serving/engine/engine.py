"""Starts a vLLM engine with its OpenAI classes, as vLLM's own server does, in as few processes as possible.

Ray Serve LLM's wrapper is not used: it adds a second process per GPU, a task that reads the configuration, and a layer that
parses and serializes every event again.

Imports vLLM: only replicas import this file.
"""

import argparse
import asyncio
import difflib
import os
from dataclasses import dataclass, fields
from typing import Any

from starlette.datastructures import State
from vllm.config import KVEventsConfig, StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.usage.usage_lib import UsageContext
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import Executor

from strata.platform.errors import UserError
from strata.serving.engine import profiled
from strata.serving.engine.disaggregation import Engine
from strata.serving.engine.kv_events import Endpoints, Receiver
from strata.serving.engine.lora import Lora
from strata.serving.engine.pool_load import PoolLoad
from strata.serving.engine.prefixes import Prefixes
from strata.serving.engine.replica_api import DecodeCalls, PrefillCalls
from strata.serving.kv_offload import place_check
from strata.serving.metrics import exposition
from strata.serving.metrics.telemetry import Replica as Telemetry
from strata.serving.metrics.tracing import Tracer
from strata.serving.models import hybrid_check
from strata.serving.models.adapter import BASE
from strata.serving.routing.kv.cached_blocks import CachedBlocks
from strata.serving.routing.kv.prefix_log import PrefixLog
from strata.serving.routing.kv.prefix_tokens import token_lengths
from strata.serving.scaling.serve_policy import EngineReport
from strata.serving.spec import EngineSpec
from strata.serving.transport.peers import Peers
from strata.serving.vllm_patches import (
    detokenizer_tail,
    engine_stats,
    lora_base,
    preforked_engine,
    stop_within_step,
    vocabulary,
)
from strata.serving.vllm_patches.engine_stats import EngineStats
from strata.serving.vllm_patches.parent_watchdog import REPLICA_PID

SHARED_STEP_TOKENS = 4096  # smallest step that two long prompts share


@dataclass(frozen=True)
class Started:
    """Running engine with its metrics."""

    vllm: Any  # AsyncLLM
    app_state: Any  # vLLM's OpenAI classes around it
    telemetry: Telemetry
    stats: EngineStats
    labels: dict[str, str]  # added to vLLM's own series, which have no replica label
    kv_events: Receiver | None = None
    lora: Lora | None = None
    profiling: asyncio.Task[None] | None = None  # referenced here, because event loops drop tasks without a reference

    @property
    def context(self) -> int:
        return int(self.vllm.model_config.max_model_len)

    @property
    def healthy(self) -> bool:
        return not self.vllm.errored

    async def check_health(self) -> None:
        await self.vllm.check_health()

    def report(self, startup_s: float) -> EngineReport:
        """Figures for the autoscaler."""
        cache, stats = self.vllm.vllm_config.cache_config, self.stats
        times = stats.fit.times()
        return EngineReport(
            startup_s=startup_s,
            kv_tokens=float((cache.num_gpu_blocks or 0) * cache.block_size),
            waiting=float(stats.waiting),
            kv_use=stats.kv_usage,
            cached_share=stats.cached_share,
            **(vars(times) if times is not None else {}),
        )

    def load(self) -> dict[str, Any]:
        """Figures for callers, sent with every pong."""
        return self.stats.load() | (self.lora.loaded.report() if self.lora is not None else {})

    def metrics(self) -> str:
        if self.lora is not None:
            self.lora.loaded.record()
        return exposition.merge([({}, self.telemetry.text()), (self.labels, engine_stats.vllm_text())])


async def start(spec: EngineSpec, replica: str, host: str) -> Started:
    """Starts an engine. `host` is the address of its NIXL side channel."""
    os.environ[REPLICA_PID] = str(os.getpid())
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
    # An engine has one grammar backend, chosen by its first request unless set. `grammar_trial.py` checks grammars with xgrammar.
    grammars = StructuredOutputsConfig(backend="xgrammar")
    _check_names(spec.extra_engine_args)
    if spec.kv_offload is not None:
        place_check.check(spec.kv_offload)
    endpoints = Endpoints() if spec.kv_events else None
    events = KVEventsConfig(**endpoints.arguments()) if endpoints is not None else None
    args = AsyncEngineArgs(
        model=spec.model_dir,
        tokenizer=spec.tokenizer_dir,
        served_model_name=[BASE if spec.adapter else spec.model_id],
        structured_outputs_config=grammars,
        kv_events_config=events,
        **spec.engine_kwargs(),
    )
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    if spec.disaggregated and config.model_config.runner_type == "pooling":
        cause = "This model makes embeddings or scores: it decodes nothing, so there is no prefill to separate."
        raise UserError(cause, "Set serve.prefill.replicas=0.")
    if spec.adapters is not None and config.model_config.runner_type == "pooling":
        raise UserError("This model makes embeddings or scores, which have no adapters.", "Remove serve.adapters.")
    if spec.disaggregated:
        hybrid_check.check_loaded(config.model_config.hf_text_config, config.model_config.is_hybrid)
    if "long_prefill_token_threshold" not in spec.engine_kwargs():
        config.scheduler_config.long_prefill_token_threshold = longest_chunk(config)
    if spec.device == "cpu":
        # vLLM runs its CPU worker in a separate process to bind OpenMP threads. Here the environment sets the threads, so
        # scheduler and worker share a process, which saves one import of vLLM per engine.
        config.parallel_config.distributed_executor_backend = "uni"
        preforked_engine.install()
        if spec.adapters is not None or spec.adapter is not None:
            lora_base.install()  # an engine that is forked from this process has it too
    if spec.speculation is not None:
        if config.model_config.runner_type == "pooling":
            raise UserError("This model makes embeddings or scores: it has no tokens to draft.", "Remove serve.speculative.")
        scheduler = config.scheduler_config
        scheduler.scheduler_cls = spec.speculation.scheduler(bool(scheduler.async_scheduling))
    receiver = Receiver(endpoints) if endpoints is not None else None
    traces = profiled.prepare(config, spec.role, replica)
    vllm = AsyncLLM(config, Executor.get_class(config), log_stats=True, log_requests=False)
    state = State()
    adapters = [LoRAModulePath(spec.model_id, str(spec.adapter.folder))] if spec.adapter else None
    frontend = argparse.Namespace(**(vars(FrontendArgs(**spec.frontend_kwargs(), lora_modules=adapters)) | vars(args)))
    await init_app_state(vllm, state, frontend, await vllm.get_supported_tasks())
    telemetry = Telemetry(spec.model_id, spec.role, replica)
    stats = engine_stats.attach(vllm, telemetry)
    detokenizer_tail.install()
    stop_within_step.install()
    vocabulary.install(vllm)
    # As vLLM's own server does. Half a million objects live as long as the process; scanning them for garbage takes a quarter
    # of a second, in which no stream advances.
    freeze_gc_heap()
    lora = Lora(vllm, state.openai_serving_models, spec.adapters, telemetry) if spec.adapters is not None else None
    profiling = asyncio.create_task(profiled.follow(vllm, traces, spec.role, replica)) if traces is not None else None
    return Started(vllm, state, telemetry, stats, {"role": spec.role, "replica": replica}, receiver, lora, profiling)


def longest_chunk(config: Any) -> int:
    """Tokens of one prompt in a step; 0 is no limit. vLLM's default gives a long prompt whole steps, and a short one behind it
    waits for all of them. Half of a large step still fills the device."""
    step = config.scheduler_config.max_num_batched_tokens
    chunked = config.scheduler_config.enable_chunked_prefill and config.model_config.max_model_len > step // 2
    return step // 2 if chunked and step >= SHARED_STEP_TOKENS else 0


def _check_names(arguments: dict[str, Any]) -> None:
    known = [field.name for field in fields(AsyncEngineArgs)]
    for name in arguments.keys() - set(known):
        alike = " or ".join(difflib.get_close_matches(name, known, 3)) or "see 'Engine Arguments' in its documentation"
        raise UserError(f"vLLM's engine has no argument '{name}': {alike}?", "Correct serve.engine.")


def prefill_calls(started: Started, spec: EngineSpec) -> PrefillCalls:
    adapters = started.app_state.openai_serving_models.lora_requests
    return PrefillCalls(started.vllm, decode_calls(started, spec, None, standby=True), adapters)


def decode_calls(started: Started, spec: EngineSpec, pool: Peers | None, standby: bool = False) -> DecodeCalls:
    log = PrefixLog() if spec.announces_prefixes and not standby else None
    prefixes = _prefixes(started, log)
    load = PoolLoad(started.stats, spec.rule.min_tokens)
    engine = Engine(started.vllm, pool, spec.rule, prefixes, load, started.telemetry, standby)
    tracer = Tracer(spec.role, started.labels["replica"])
    model = (spec.max_sequences, spec.model_id)
    return DecodeCalls(started.app_state, engine, started.metrics, *model, tracer, log, started.lora)


def _prefixes(started: Started, log: PrefixLog | None) -> Prefixes:
    if started.kv_events is None:
        return Prefixes()
    config = started.vllm.vllm_config
    blocks = CachedBlocks(config.cache_config.block_size, PrefixLog() if log is None else log)
    started.kv_events.begin(blocks)
    model = config.model_config
    return Prefixes(blocks, token_lengths(started.vllm.get_tokenizer(), model.get_vocab_size()) if log is not None else None)
