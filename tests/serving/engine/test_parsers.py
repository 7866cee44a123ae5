"""`serve.tool_parser` and `serve.reasoning_parser`: from the recipe through vLLM's OpenAI classes to the answer.

Everything of a replica is real except the engine, which generates a given text.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.outputs import CompletionOutput, RequestOutput
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
THOUGHT, SPOKEN = "The user asks for the weather.", "Let me look."
CALLED = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
TEXT = f"<think>{THOUGHT}</think>{SPOKEN}<tool_call>\n{json.dumps(CALLED)}\n</tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
SIZES = ["model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=1", "model.ffn=64", "model.vocab=512"]
SIZES += ["model.context=1024"]  # tools are part of the prompt


class Scripted:
    """Stand-in for vLLM's AsyncLLM that generates TEXT for every prompt, one token after the other."""

    def __init__(self, config: Any, executor: Any, **_: Any) -> None:
        config.cache_config.num_gpu_blocks = 16
        self.vllm_config, self.model_config, self.errored = config, config.model_config, False
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self.output_processor = SimpleNamespace(add_request=None, request_states={})
        manager = SimpleNamespace(processes=[])
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))

    def check_admission(self, sequences: int) -> None:
        pass

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[RequestOutput]:
        words = self.renderer.tokenizer
        ids = words.encode(TEXT, add_special_tokens=False)
        texts = [words.decode([token]) for token in ids]
        assert "".join(texts) == TEXT
        chunks = [([token], text) for token, text in zip(ids, texts, strict=True)]
        if params.output_kind == RequestOutputKind.FINAL_ONLY:
            chunks = [(ids, TEXT)]
        for number, (tokens, text) in enumerate(chunks):
            last = number == len(chunks) - 1
            part = CompletionOutput(0, text, tokens, None, None, finish_reason="stop" if last else None)
            yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [part], finished=last)
            await asyncio.sleep(0)


class NoTrial:
    """Stand-in for the process that checks grammars (`test_requests.py`)."""

    def __init__(self, *_: Any) -> None:
        pass

    async def check(self, request: Any) -> None:
        pass


class Call:
    """Call of a gateway, which collects the answer."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.method, self.body, self.meta = "chat", json.dumps(tree).encode(), {"request_id": "r"}
        self.status, self.received = 0, []  # type: tuple[int, list[bytes]]
        self.head = lambda head: setattr(self, "status", head["status"])
        self.data = self.received.append
        self.end = lambda trailer: None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, section = tmp_path_factory.mktemp("model"), recipe_file.load("laptop", SIZES).model
    write_folder(folder, Llama(section).state_dict(), section, torch.float32)
    words = tokenizer.train(["the user asks for the weather in a city"] * 3, 400)
    words.add_tokens(MARKS)
    tokenizer.save(words, folder, section.context)
    return folder


@pytest.fixture
def chat(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Function that answers a chat request with the given recipe overrides."""
    for name in (REPLICA_PID, "VLLM_NIXL_SIDE_CHANNEL_HOST"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(engine, "AsyncLLM", Scripted)
    monkeypatch.setattr(engine, "freeze_gc_heap", lambda: None)
    monkeypatch.setattr(replica_api, "GrammarTrial", NoTrial)
    monkeypatch.setattr(engine.engine_stats, "attach", lambda vllm, telemetry: EngineStats(telemetry, 1))
    for patch in (engine.preforked_engine, engine.detokenizer_tail):
        monkeypatch.setattr(patch, "install", lambda *_: None)

    def answer(overrides: list[str], **asked: Any) -> tuple[int, list[Any]]:
        async def run() -> tuple[int, list[Any]]:
            serve = recipe_file.load("laptop", ["serve.prefill.replicas=0", *overrides]).serve
            spec = EngineSpec.of("decode", serve, model, "tiny", Network.within(one_machine=True))
            for name, value in spec.environment().items():
                monkeypatch.setenv(name, value)
            calls: DecodeCalls = engine.decode_calls(await engine.start(spec, "r", "127.0.0.1"), spec, None)
            call = Call({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200} | asked)
            await calls.handle(call)  # type: ignore[arg-type]
            if not asked.get("stream") or call.status != 200:
                return call.status, [json.loads(data) for data in call.received]
            events = [unpack_event(data)[2].decode() for data in call.received]
            found = [event.removeprefix("data: ").strip() for text in events for event in text.split("\n\n") if event]
            return call.status, [json.loads(event) for event in found if event != "[DONE]"]

        return asyncio.run(run())

    yield answer


HERMES, DEEPSEEK = "serve.tool_parser=hermes", "serve.reasoning_parser=deepseek_r1"


def test_text_is_unchanged_without_parsers(chat: Any) -> None:
    status, (answer,) = chat([])
    assert status == 200 and answer["choices"][0]["message"]["content"] == TEXT


def test_tool_calls_are_parsed(chat: Any) -> None:
    status, (answer,) = chat([HERMES], tools=TOOLS)
    choice = answer["choices"][0]
    assert status == 200 and choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == CALLED["arguments"]


def test_reasoning_is_separated_from_the_answer(chat: Any) -> None:
    status, (answer,) = chat([DEEPSEEK])
    message = answer["choices"][0]["message"]
    assert status == 200 and message["reasoning"] == THOUGHT and message["content"].startswith(SPOKEN)


def test_both_parsers_in_a_stream(chat: Any) -> None:
    status, events = chat([HERMES, DEEPSEEK], tools=TOOLS, stream=True)
    assert status == 200
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == THOUGHT
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == SPOKEN
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert "".join(call.get("name") or "" for call in calls) == "weather"
    assert json.loads("".join(call.get("arguments") or "" for call in calls)) == CALLED["arguments"]
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "tool_calls"


def test_tools_without_a_parser_are_refused(chat: Any) -> None:
    status, (answer,) = chat([DEEPSEEK], tools=TOOLS)
    assert status == 400 and "serve.tool_parser" in answer["error"]["message"]


@pytest.mark.parametrize("key", ["serve.tool_parser", "serve.reasoning_parser"])
def test_unknown_parser_ends_the_start(chat: Any, key: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError), match="no-such-parser"):
        chat([f"{key}=no-such-parser"], tools=TOOLS)
