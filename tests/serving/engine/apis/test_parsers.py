"""`serve.tool_parser` and `serve.reasoning_parser`: from the recipe through vLLM's OpenAI classes to the answer.

Everything of a replica is real except the engine, which generates a given text.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted_replica

THOUGHT, SPOKEN = "The user asks for the weather.", "Let me look."
CALLED = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
TEXT = f"<think>{THOUGHT}</think>{SPOKEN}<tool_call>\n{json.dumps(CALLED)}\n</tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    scripted_replica.write_model(folder)
    return folder


@pytest.fixture
def chat(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Function that answers a chat request with the given recipe overrides."""
    scripted_replica.install(monkeypatch, TEXT)

    def answer(overrides: list[str], **asked: Any) -> tuple[int, list[Any]]:
        async def run() -> tuple[int, list[Any]]:
            calls, _ = await scripted_replica.replica(monkeypatch, model, overrides)
            call = scripted_replica.Call("chat", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200} | asked)
            await calls.handle(call)  # type: ignore[arg-type]
            if not asked.get("stream") or call.status != 200:
                return call.status, [json.loads(data) for data in call.received]
            return call.status, scripted_replica.events("".join(text for _, text in call.payloads()))

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
