"""Ray Serve LLM's server around a vLLM engine, started with as few processes as it takes.

Imports vLLM: only replicas import this file.
"""

import os
from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm import LLMConfig, LLMServer
from ray.serve.llm.openai_api_models import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest

from strata.serving.fate import REPLICA_PID
from strata.serving.spec import EngineSpec


class ModelIsLocal(CallbackBase):  # type: ignore[misc]
    """A model folder needs no download, and the task that would do it costs a worker process that imports vLLM."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False


class Engine(VLLMEngine):  # type: ignore[misc]
    async def start(self) -> None:
        await super().start()
        # vLLM 0.29 renamed this; Ray 2.60 still looks for the old name and says that no model can tokenize.
        self._oai_serving_tokenization = self._app_state.serving_tokenization


class OneProcessEngine(Engine):
    """On the CPU vLLM puts its worker into a process of its own, to bind OpenMP threads there. Our threads are set by
    the environment instead, so scheduler and worker share a process: one import of vLLM less per engine."""

    def _start_async_llm_engine(self, engine_args: Any, engine_config: Any, placement_group: Any) -> Any:
        engine_config.parallel_config.distributed_executor_backend = "uni"
        return super()._start_async_llm_engine(engine_args, engine_config, placement_group)


class Server(LLMServer):  # type: ignore[misc]
    """Without the usage report, which starts an actor of its own that imports vLLM once more."""

    async def _start_engine(self) -> None:
        await self.engine.start()


async def start(spec: EngineSpec) -> LLMServer:
    config = LLMConfig(
        model_loading_config={"model_id": spec.model_id, "model_source": spec.model_dir},
        accelerator_config={"kind": spec.device},
        placement_group_config={"bundles": spec.bundles()},
        engine_kwargs=spec.engine_kwargs(),
        runtime_env={"env_vars": spec.environment()},
        callback_config={"callback_class": ModelIsLocal},
        experimental_configs={"NIXL_SIDE_CHANNEL_PORT_BASE": spec.nixl_port, "stream_batching_interval_ms": 0},
    )
    os.environ[REPLICA_PID] = str(os.getpid())
    server = Server.sync_init(config, engine_cls=OneProcessEngine if spec.device == "cpu" else Engine)
    await server.start()
    return server


async def count_prompt_tokens(server: LLMServer, request: Any) -> int | ErrorResponse:
    """Rendered and tokenized as the engine will do it, so that a prompt that cannot fit costs no prefill."""
    if isinstance(request, ChatCompletionRequest):
        shared = TokenizeChatRequest.model_fields.keys() & type(request).model_fields.keys()
        probe: Any = TokenizeChatRequest.model_construct(**{name: getattr(request, name) for name in shared})
    elif isinstance(request.prompt, str):
        probe = TokenizeCompletionRequest(prompt=request.prompt, add_special_tokens=request.add_special_tokens)
    else:
        return len(request.prompt)
    async for answer in await server.tokenize(probe):
        return answer if isinstance(answer, ErrorResponse) else int(answer.count)
    raise RuntimeError("the engine's tokenizer gave no answer")
