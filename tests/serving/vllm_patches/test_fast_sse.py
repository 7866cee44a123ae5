"""Events of `fast_sse.py` equal those of vLLM."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import CompletionOutput, RequestOutput

from strata.serving.vllm_patches.fast_sse import FastChat, FastCompletion

TEXTS = ["Hello", ' "quoted"\n', "", "naïve ☃ 𝄞", "\u2028\x7f", "end"]


def outputs(stop_reason: Any, finish: str) -> list[RequestOutput]:
    made = []
    for number, text in enumerate(TEXTS):
        last = number == len(TEXTS) - 1
        part = CompletionOutput(0, text, [number], None, None, finish_reason=finish if last else None)
        part.stop_reason = stop_reason if last else None
        made.append(RequestOutput("r", "p", [1, 2, 3], None, [part], finished=last))
    return made


async def stream(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def events(generator: AsyncIterator[str]) -> list[str]:
    async def collect() -> list[str]:
        return [event async for event in generator]

    return asyncio.run(collect())


def parsed(raw: list[str]) -> list[Any]:
    assert all(event.startswith("data: ") and event.endswith("\n\n") for event in raw)
    texts = [event.removeprefix("data: ").strip() for event in raw]
    trees = [json.loads(text) if text != "[DONE]" else text for text in texts]
    for tree in trees:
        if isinstance(tree, dict):
            assert isinstance(tree.pop("created"), int)
    return trees


def serving(kind: type, fingerprint: str | None) -> Any:
    made = kind.__new__(kind)
    made.enable_force_include_usage = made.enable_prompt_tokens_details = made.enable_per_request_metrics = False
    made.system_fingerprint = fingerprint
    made.parser_cls = made.request_logger = None
    made.enable_log_outputs = made._include_reasoning_tokens_details = False
    made.response_role = "assistant"
    return made


@pytest.mark.parametrize("fingerprint", [None, "vllm-1"])
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@pytest.mark.parametrize(("stop_reason", "finish"), [(None, "length"), ("\n\n", "stop"), (17, "stop")])
def test_events_equal_vllms(fingerprint: str | None, options: dict | None, stop_reason: Any, finish: str) -> None:
    made = outputs(stop_reason, finish)
    request = CompletionRequest(model="m", prompt="p", stream=True, stream_options=options, max_tokens=9)

    def completion(kind: type) -> list[Any]:
        generator = serving(kind, fingerprint).completion_stream_generator(
            request,
            [],
            stream([(0, output) for output in made]),
            "cmpl-1",
            5,
            "m",
            num_prompts=1,
            tokenizer=None,
            request_metadata=SimpleNamespace(),
        )
        return parsed(events(generator))

    assert completion(FastCompletion) == completion(OpenAIServingCompletion)
    asked = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], stream=True, stream_options=options)

    def chat(kind: type) -> list[Any]:
        generator = serving(kind, fingerprint).chat_completion_stream_generator(
            asked, stream(made), "chatcmpl-1", "m", [], None, SimpleNamespace()
        )
        return parsed(events(generator))

    assert chat(FastChat) == chat(OpenAIServingChat)


@pytest.mark.parametrize(
    "generator",
    [OpenAIServingCompletion.completion_stream_generator, OpenAIServingChat.chat_completion_stream_generator],
)
def test_vllm_still_needs_it(generator: Any) -> None:
    assert "chunk.model_dump_json" in inspect.getsource(generator), (
        f"vLLM's {generator.__name__} no longer calls model_dump_json for every token: measure again and review fast_sse.py."
    )
