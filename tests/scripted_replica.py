"""A decode replica of which everything is real except the engine, which generates a given text."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.input_processor import InputProcessor

from strata.platform import recipe_file
from strata.serving.engine import engine, replica_api
from strata.serving.engine.replica_api import DecodeCalls
from strata.serving.engine.request_context import unpack_event
from strata.serving.spec import EngineSpec, Network
from strata.serving.vllm_patches.engine_stats import EngineStats
from strata.serving.vllm_patches.parent_watchdog import REPLICA_PID
from strata.training.checkpoint.export import write_folder
from strata.training.data import tokenizer
from strata.training.model.llama import Llama

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
SIZES = ["model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=1", "model.ffn=64", "model.vocab=512"]
SIZES += ["model.context=1024"]  # tools are part of the prompt


def write_model(folder: Path) -> None:
    section = recipe_file.load("laptop", SIZES).model
    write_folder(folder, Llama(section).state_dict(), section, torch.float32)
    words = tokenizer.train(["the user asks for the weather in a city"] * 3, 400)
    words.add_tokens(MARKS)
    tokenizer.save(words, folder, section.context)


class Scripted:
    """Stand-in for vLLM's AsyncLLM that generates `text` for every prompt, one token after the other."""

    text = ""

    def __init__(self, config: Any, executor: Any, **_: Any) -> None:
        config.cache_config.num_gpu_blocks = 16
        self.vllm_config, self.model_config, self.errored = config, config.model_config, False
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self.output_processor = SimpleNamespace(add_request=None, request_states={})
        manager = SimpleNamespace(processes=[])
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
        self.asked: list[dict[str, Any]] = []
        self.detokenized: dict[str, list[str]] = {}  # texts of resumed tokens, by request

    def check_admission(self, sequences: int) -> None:
        pass

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",) if self.model_config.runner_type == "generate" else (self.model_config.convert_type,)

    async def encode(self, prompt: Any, pooling_params: Any, request_id: str, **_: Any) -> AsyncIterator[PoolingRequestOutput]:
        """Two numbers: the tokens of the prompt, and the last of them."""
        ids = prompt["prompt_token_ids"]
        values = torch.tensor([float(len(ids)), float(ids[-1])])
        pooled = PoolingOutput(values[:1] if pooling_params.task == "classify" else values)
        yield PoolingRequestOutput(request_id, pooled, prompt_token_ids=ids, num_cached_tokens=0, finished=True)

    async def generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> AsyncIterator[RequestOutput]:
        self.asked.append({"prompt": prompt, "params": params, "id": request_id} | more)
        words = self.renderer.tokenizer
        ids = words.encode(self.text, add_special_tokens=False)
        texts = [words.decode([token]) for token in ids]
        assert "".join(texts) == self.text
        given = prompt["prompt_token_ids"]
        done = next((count for count in range(len(ids), 0, -1) if list(given[-count:]) == ids[:count]), 0)
        self.detokenized[request_id] = texts[:done]
        chunks = [([token], text) for token, text in zip(ids, texts, strict=True)][done:]
        if params.output_kind == RequestOutputKind.FINAL_ONLY:
            chunks = [(ids, self.text)]
        prompt_ids = given[: len(given) - done]
        for number, (tokens, text) in enumerate(chunks):
            last = number == len(chunks) - 1
            part = CompletionOutput(0, text, tokens, None, None, finish_reason="stop" if last else None)
            yield RequestOutput(request_id, None, prompt_ids, None, [part], finished=last)
            await asyncio.sleep(0)


class NoTrial:
    """Stand-in for the process that checks grammars (`test_requests.py`)."""

    def __init__(self, *_: Any) -> None:
        pass

    async def check(self, request: Any) -> None:
        pass


class Call:
    """Call of a gateway, which collects the answer."""

    def __init__(self, method: str, tree: dict[str, Any], **meta: Any) -> None:
        self.method, self.body, self.meta = method, json.dumps(tree).encode(), {"request_id": "r"} | meta
        self.heads: list[dict[str, Any]] = []
        self.received: list[bytes] = []
        self.trailers: list[dict[str, Any]] = []
        self.head, self.data, self.end = self.heads.append, self.received.append, self.trailers.append

    @property
    def status(self) -> int:
        return int(self.heads[-1]["status"]) if self.heads else 0

    def json(self) -> Any:
        return json.loads(b"".join(self.received))

    def payloads(self) -> list[tuple[tuple[int, ...], str]]:
        """Token ids and events of each part of a stream."""
        return [(tokens, event.decode()) for _, tokens, event in map(unpack_event, self.received)]


def events(text: str) -> list[dict[str, Any]]:
    """Data of the events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def install(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for name in (REPLICA_PID, "VLLM_NIXL_SIDE_CHANNEL_HOST"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(Scripted, "text", text)
    monkeypatch.setattr(engine, "AsyncLLM", Scripted)
    monkeypatch.setattr(engine, "freeze_gc_heap", lambda: None)
    monkeypatch.setattr(replica_api, "GrammarTrial", NoTrial)
    monkeypatch.setattr(engine.engine_stats, "attach", lambda vllm, telemetry: EngineStats(telemetry, 1))
    for patch in (engine.preforked_engine, engine.detokenizer_tail, engine.stop_within_step):
        monkeypatch.setattr(patch, "install", lambda *_: None)


async def replica(monkeypatch: pytest.MonkeyPatch, model: Path, overrides: Sequence[str] = ()) -> tuple[DecodeCalls, Scripted]:
    """Replica with the given recipe overrides, and its engine. After `install`."""
    serve = recipe_file.load("laptop", ["serve.prefill.replicas=0", *overrides]).serve
    spec = EngineSpec.of("decode", serve, model, "tiny", Network.within(one_machine=True))
    for name, value in spec.environment().items():
        monkeypatch.setenv(name, value)
    started = await engine.start(spec, "r", "127.0.0.1")
    calls: DecodeCalls = engine.decode_calls(started, spec, None)
    calls._engine._resumption._texts = started.vllm.detokenized
    return calls, started.vllm
