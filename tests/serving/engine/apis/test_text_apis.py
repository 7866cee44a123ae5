"""`/v1/responses` and `/v1/messages` on a replica: whole answers, streams, and streams that another replica continues."""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted_replica
import span_collector
from scripted_replica import Call, events
from span_collector import attributes
from support import within
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from strata.platform.errors import UserError
from strata.serving.api.dialects.responses import MAX_ITEMS, MAX_TOOLS, next_number
from strata.serving.api.grammar_trial import _grammars

THOUGHT, SPOKEN = "The user asks for the weather.", "Let me look."
ARGUMENTS = {"city": "Oslo", "days": 2}
CALLED = json.dumps({"name": "weather", "arguments": ARGUMENTS})
TEXT = f"<think>{THOUGHT}</think>{SPOKEN}<tool_call>\n{CALLED}\n</tool_call>"
PARSERS = ["serve.tool_parser=hermes", "serve.reasoning_parser=deepseek_r1"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
RESPONSE = {
    "input": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
    "max_output_tokens": 200,
}
MESSAGE = {
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
    "max_tokens": 200,
}

Ask = Callable[..., list[Call]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    scripted_replica.write_model(folder)
    return folder


@pytest.fixture
def ask(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Function that sends calls to one replica, one after the other."""

    def answered(*calls: Call, text: str = TEXT, overrides: list[str] = PARSERS) -> list[Call]:
        scripted_replica.install(monkeypatch, text)

        async def run() -> None:
            replica, _ = await scripted_replica.replica(monkeypatch, model, overrides)
            for call in calls:
                await replica.handle(call)  # type: ignore[arg-type]

        asyncio.run(run())
        return list(calls)

    yield answered


def test_whole_response(ask: Ask) -> None:
    (call,) = ask(Call("responses", RESPONSE, created=7))
    answer = call.json()
    assert call.status == 200 and (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "tiny")
    assert (answer["id"], answer["created_at"]) == ("resp_r", 7)
    reasoning, message, called = answer["output"]
    assert reasoning["content"][0]["text"] == THOUGHT
    assert message["content"][0]["text"] == SPOKEN
    assert (called["type"], called["name"], json.loads(called["arguments"])) == ("function_call", "weather", ARGUMENTS)
    assert [item["id"] for item in answer["output"]] == ["item_r_0", "item_r_1", "item_r_2"]
    assert answer["usage"]["output_tokens"] == call.trailers[0]["tokens"] > 10
    assert answer["usage"]["input_tokens"] == call.trailers[0]["prompt_tokens"]


def test_whole_message(ask: Ask) -> None:
    (call,) = ask(Call("messages", MESSAGE))
    answer = call.json()
    assert call.status == 200 and (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    thinking, spoken, used = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", THOUGHT)
    assert spoken == {"type": "text", "text": SPOKEN}
    assert (used["type"], used["name"], used["input"]) == ("tool_use", "weather", ARGUMENTS)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"]["output_tokens"] == call.trailers[0]["tokens"]


def test_events_of_a_response(ask: Ask) -> None:
    (call,) = ask(Call("responses", RESPONSE | {"stream": True}))
    found = events("".join(text for _, text in call.payloads()))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] == "response.completed"
    deltas = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    assert deltas == SPOKEN
    arguments = "".join(event["delta"] for event in found if event["type"] == "response.function_call_arguments.delta")
    assert json.loads(arguments) == ARGUMENTS
    added = [event["item"] for event in found if event["type"] == "response.output_item.added"]
    last = found[-1]["response"]["output"]
    # The ids of the last event are those of the events before it.
    assert [(item["id"], item.get("call_id")) for item in last] == [(item["id"], item.get("call_id")) for item in added]
    # The events before the first token come with it: until then the request could be sent to another replica.
    tokens, text = call.payloads()[0]
    assert len(tokens) == 1 and text.startswith("event: response.created\n")


def test_response_that_reached_its_limit_is_incomplete(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def shortened(*fields: Any, finish_reason: str | None = None) -> Any:
        return original(*fields, finish_reason="length" if finish_reason else None)

    original = scripted_replica.CompletionOutput
    monkeypatch.setattr(scripted_replica, "CompletionOutput", shortened)
    whole, stream = ask(Call("responses", RESPONSE), Call("responses", RESPONSE | {"stream": True}))
    assert (whole.json()["status"], whole.json()["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert events(stream.payloads()[-1][1])[-1]["type"] == "response.incomplete"


def test_events_of_a_message(ask: Ask) -> None:
    (call,) = ask(Call("messages", MESSAGE | {"stream": True}))
    found = events("".join(text for _, text in call.payloads()))
    assert [event["type"] for event in found if event["type"].startswith("message")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    starts = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(delta["thinking"] for delta in deltas if delta["type"] == "thinking_delta") == THOUGHT
    assert "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta") == SPOKEN
    assert json.loads("".join(delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta")) == ARGUMENTS
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def joined(found: list[dict[str, Any]]) -> list[Any]:
    """Events without what differs between replicas, with adjacent deltas of one kind joined: a continued stream may split text
    differently."""
    plain: list[Any] = []
    for event in found:
        event = {key: value for key, value in event.items() if key != "sequence_number"}
        if event["type"] == "content_block_delta" and "signature" not in event["delta"]:
            (key,) = event["delta"].keys() - {"type"}
            kind, text = (event["index"], event["delta"]["type"]), event["delta"][key]
        elif event["type"].endswith(".delta"):
            kind, text = (event["output_index"], event["type"]), event["delta"]
        else:
            plain.append(event)
            continue
        if plain and isinstance(plain[-1], tuple) and plain[-1][0] == kind:
            text = plain.pop()[1] + text
        plain.append((kind, text))
    return plain


def unsigned(found: list[Any]) -> list[Any]:
    text = json.dumps(found)
    for event in found:
        if isinstance(event, dict) and "signature" in event.get("delta", {}):  # random
            text = text.replace(event["delta"]["signature"], "")
        if isinstance(event, dict) and event.get("content_block", {}).get("id"):
            text = text.replace(event["content_block"]["id"], "")
    return list(json.loads(text))


@pytest.mark.parametrize(("method", "asked"), [("responses", RESPONSE), ("messages", MESSAGE)])
def test_stream_continues_after_any_part(ask: Ask, method: str, asked: dict[str, Any]) -> None:
    asked = asked | {"stream": True}
    (whole,) = ask(Call(method, asked, created=1))
    parts = whole.payloads()
    expected = events("".join(text for _, text in parts))
    cuts = range(1, len(parts))
    calls = []
    for cut in cuts:
        emitted = [token for tokens, _ in parts[:cut] for token in tokens]
        more = {"events": next_number(parts[cut - 1][1].encode())} if method == "responses" else {}
        calls.append(Call(method, asked, created=1, resumed=emitted, **more))
    for cut, call in zip(cuts, ask(*calls), strict=True):
        assert not call.heads  # the client has one
        found = events("".join(text for _, text in [*parts[:cut], *call.payloads()]))
        assert unsigned(joined(found)) == unsigned(joined(expected)), f"after {cut} of {len(parts)} parts"
        if method == "responses":
            assert [event["sequence_number"] for event in found] == list(range(len(found)))
        tokens = [token for part in (*parts[:cut], *call.payloads()) for token in part[0]]
        assert tokens == [token for part in parts for token in part[0]]
    assert len(parts) > 20  # token by token


def test_each_part_holds_all_events_of_its_tokens(ask: Ask) -> None:
    for method, asked in (("responses", RESPONSE), ("messages", MESSAGE)):
        (call,) = ask(Call(method, asked | {"stream": True}))
        assert all(tokens for tokens, _ in call.payloads())
        finished = [payload[0] & 1 for payload in call.received]
        assert finished == [0] * (len(finished) - 1) + [1]


def test_model_and_unknown_fields(ask: Ask) -> None:
    no_tools = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
    calls = ask(
        Call("messages", no_tools | {"model": "other"}),
        Call("messages", no_tools | {"max_token": 3}),
        Call("messages", {"messages": no_tools["messages"]}),
        Call("count_tokens", {"messages": no_tools["messages"]}),
        Call("count_tokens", no_tools),
        Call("responses", {"input": "hello", "max_tokens": 3}),
        overrides=[],
    )
    assert [call.status for call in calls] == [404, 400, 400, 200, 400, 400]
    assert calls[0].json()["error"]["type"] == "not_found_error" and calls[0].json()["type"] == "error"
    assert "Did you mean 'max_tokens'?" in calls[1].json()["error"]["message"]
    assert calls[2].json()["error"]["message"].startswith("max_tokens: ")
    assert calls[3].json()["input_tokens"] > 3
    assert "Did you mean 'max_output_tokens'?" in calls[5].json()["error"]["message"]


PICTURE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x"}}


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("responses", {"input": [{"type": "computer_call"}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/"}]}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "file:///etc/passwd"}]}]}),
        (
            "responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]}]},
        ),
        ("responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" * 70 + "]" * 70}]}),
        ("responses", {"input": [{"role": "tool", "content": "x"}]}),
        ("responses", {"input": [{"role": ["user"], "content": "x"}]}),
        ("responses", {"input": [{"type": "message", "role": "assistant", "content": [{"type": "output_text"}, 3]}]}),
        ("responses", {"input": [None, 3, "x", []]}),
        ("responses", {"input": 3}),
        ("responses", {"input": []}),
        ("responses", {"input": "x", "previous_response_id": "resp_1"}),
        ("responses", {"input": "x", "background": True}),
        ("responses", {"input": "x", "conversation": "c"}),
        ("responses", {"input": "x", "prompt": {"id": "p"}}),
        ("responses", {"input": "x", "include": ["file_search_call.results"]}),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}),
        ("responses", {"input": "x", "tools": [{"type": "mcp", "server_label": "l", "server_url": "http://127.0.0.1/"}]}),
        ("responses", {"input": "x", "tools": ["f"]}),
        ("responses", {"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
        ("responses", {"input": "x", "structured_outputs": {"structural_tag": "{}"}}),
        ("responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}),
        ("responses", {"input": "x", "text": {"verbosity": "low"}}),
        ("responses", {"input": "x", "temperature": "nan"}),
        ("responses", {"input": "x", "max_output_tokens": 0}),
        ("responses", {"input": "x", "max_output_tokens": -3}),
        ("responses", {"input": "x", "logit_bias": {"a": 1}}),
        ("responses", {"input": "x", "stop": "s" * 2000}),
        ("responses", {"input": "x", "chat_template_kwargs": {"tokenize": False}}),
        ("responses", {"input": "x" * 20_000}),
        ("responses", {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}),
        ("messages", {"messages": [{"role": "user", "content": [PICTURE]}]}),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [PICTURE]}]}]},
        ),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages", {"messages": [{"role": {}, "content": "x"}]}),
        ("messages", {"messages": [{"role": "user", "content": 3}]}),
        ("messages", {"messages": [3]}),
        ("messages", {"messages": "x"}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": []}]}),
        ("messages", {"messages": MESSAGE["messages"], "thinking": {"type": "enabled", "budget_tokens": 9}}),
        ("messages", {"messages": MESSAGE["messages"], "system": [PICTURE]}),
        ("messages", {"messages": MESSAGE["messages"], "mcp_servers": [{"url": "http://127.0.0.1"}]}),
        ("messages", {"messages": MESSAGE["messages"], "stop_sequences": ["s" * 2000]}),
        ("messages", {"messages": MESSAGE["messages"], "max_tokens": 0}),
        ("messages", {"messages": MESSAGE["messages"], "max_tokens": 10**30}),
        ("messages", {"messages": MESSAGE["messages"], "temperature": -1}),
        ("messages", {"messages": MESSAGE["messages"], "temperature": "nan"}),
        ("messages", {"messages": MESSAGE["messages"], "top_k": "9" * 30}),
        ("messages", {"messages": MESSAGE["messages"], "tool_choice": {"type": "tool", "name": "x"}}),
        ("messages", {"messages": MESSAGE["messages"], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("messages", {"messages": MESSAGE["messages"], "chat_template_kwargs": {"tools": []}}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 20_000}]}),
        ("count_tokens", {"messages": [{"role": "user", "content": [PICTURE]}]}),
        ("count_tokens", {"messages": [3]}),
        ("count_tokens", {"messages": MESSAGE["messages"], "tool_choice": {"type": "tool", "name": "x"}}),
    ],
)
def test_hostile_requests_are_refused(shared: Ask, method: str, tree: dict[str, Any]) -> None:
    more = {"max_tokens": 9} if method == "messages" and "max_tokens" not in tree else {}
    for stream in (False, True):
        (call,) = shared(Call(method, tree | more | ({"stream": True} if stream and method != "count_tokens" else {})))
        assert call.status == 400, call.received
        assert "vllm" not in call.json()["error"]["message"].lower()


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("responses", {"input": "x", "store": False, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}}),
        ("responses", {"input": "x", "instructions": "be brief", "truncation": "auto", "user": "u", "stop": ["zz"]}),
        (
            "responses",
            {
                "input": [
                    {"role": "developer", "content": "x"},
                    {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]},
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "1"},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "1"}]},
                    {
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}],
                    },
                    {"type": "message", "role": "assistant", "content": []},
                    {"role": "user", "content": "x"},
                ]
            },
        ),
        ("messages", {"messages": MESSAGE["messages"], "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}}),
        (
            "messages",
            {
                "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "x"}]},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]},
                            {"type": "text", "text": "and?"},
                        ],
                    },
                ],
                "stop_sequences": ["zz"],
                "top_k": 3,
                "top_p": 0.5,
                "temperature": 1,
            },
        ),
    ],
)
def test_usual_requests_are_answered(shared: Ask, method: str, tree: dict[str, Any]) -> None:
    more = {"max_tokens": 9} if method == "messages" else {}
    for stream in (False, True):
        (call,) = shared(Call(method, tree | more | {"stream": stream}))
        assert call.status == 200, call.received


@pytest.mark.parametrize(
    "more",
    [
        {"input": [{"role": "user", "content": "x", "phase": 5}] * 4000},
        {"input": [{"role": "user", "content": "x", "phase": 5}] * MAX_ITEMS},
        {"input": [1] * 4000},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x", "annotations": 5}] * 4000},
                {"role": "user"},
            ]
        },
        {"input": "x", "tools": [{"type": "function", "name": 5}] * 4000},
        {"input": "x", "tools": [{"type": "function", "name": 5}] * MAX_TOOLS},
    ],
)
def test_many_wrong_entries_are_refused_fast(shared: Ask, more: dict[str, Any]) -> None:
    with within(1.0):
        (call,) = shared(Call("responses", more))
    assert call.status == 400


def test_several_parts_of_an_assistant_reach_the_prompt(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_replica.install(monkeypatch, "x")

    async def run() -> str:
        replica, engine = await scripted_replica.replica(monkeypatch, model)
        parts = [{"type": "output_text", "text": "first "}, {"type": "output_text", "text": "second"}]
        items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}, {"role": "user", "content": "b"}]
        await replica.handle(Call("responses", {"input": items}))  # type: ignore[arg-type]
        return str(engine.renderer.tokenizer.decode(engine.asked[0]["prompt"]["prompt_token_ids"]))

    assert "first second" in asyncio.run(run())


def test_schemas_of_tools_and_of_the_answer_are_both_tried() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object", "title": "t"}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "string"}}}
    response = ResponsesRequest.model_validate({"input": "x", "tools": [function], "text": text})
    both = [("json", '{"type": "object", "title": "t"}'), ("json", '{"type": "string"}')]
    assert _grammars(response) == ("text", both)
    wrapped = {"type": "function", "function": {"name": "f", "parameters": function["parameters"]}}
    chat = {"messages": [], "response_format": {"type": "json_schema", "json_schema": text["format"]}}
    assert _grammars(ChatCompletionRequest.model_validate(chat | {"tools": [wrapped]})) == ("response_format", both)
    assert _grammars(ChatCompletionRequest.model_validate({"messages": [], "tools": [wrapped]})) == ("tools", both[:1])


POOLING = ["serve.engine.runner=pooling", "serve.engine.convert=embed"]


def test_embeddings_scores_and_rankings(ask: Ask) -> None:
    text, tokens, both, scored, ranked, *refused = ask(
        Call("embeddings", {"input": "the user"}),
        Call("embeddings", {"input": [5, 6, 7]}),
        Call("embeddings", {"input": ["the user", "the user asks"], "user": "u"}),
        Call("score", {"text_1": "the user", "text_2": ["the user", "asks"]}),
        Call("rerank", {"query": "the user", "documents": ["asks", "the user"], "top_n": 1}),
        Call("embeddings", {"input": "x" * 20_000}),
        Call("embeddings", {"input": "x", "dimensions": 1}),
        Call("embeddings", {"input": "x", "stream": True}),
        Call("chat", {"messages": [{"role": "user", "content": "x"}]}),
        Call("count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        overrides=POOLING,
    )
    assert text.status == tokens.status == both.status == scored.status == ranked.status == 200, refused[0].received
    assert tokens.json()["data"][0]["embedding"] == [3.0, 7.0]
    assert tokens.trailers == [{"prompt_tokens": 3, "tokens": 0}] and tokens.json()["usage"]["prompt_tokens"] == 3
    assert both.json()["data"][0]["embedding"] == text.json()["data"][0]["embedding"] and len(both.json()["data"]) == 2
    assert scored.json()["data"][0]["score"] == pytest.approx(1.0) and scored.json()["data"][1]["score"] < 1.0
    (best,) = ranked.json()["results"]
    assert (best["index"], best["document"]["text"]) == (1, "the user")
    assert [call.status for call in refused] == [400] * 5
    assert "It answers /v1/embeddings, /v1/score, /v1/rerank." in refused[3].json()["error"]["message"]
    assert refused[4].json()["type"] == "error"


def test_generating_model_makes_no_embeddings(shared: Ask) -> None:
    for method in ("embeddings", "score", "rerank"):
        (call,) = shared(Call(method, {"input": "x"}))
        assert call.status == 400 and "/v1/chat/completions" in call.json()["error"]["message"]


def test_pooling_model_has_no_prefill_pool(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_replica.install(monkeypatch, "x")
    with pytest.raises(UserError) as caught:
        asyncio.run(scripted_replica.replica(monkeypatch, model, ["serve.prefill.replicas=1", *POOLING]))
    assert caught.value.fix == "Set serve.prefill.replicas=0."


def test_spans_of_a_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    scripted_replica.install(monkeypatch, "hello there")

    async def run() -> dict[str, Any]:
        replica, engine = await scripted_replica.replica(monkeypatch, model)
        asked = {"prompt": "x", "max_tokens": 5, "stream": True}
        call = Call("completions", asked, trace={"traceparent": f"00-{trace}-{parent}-01"})
        await replica.handle(call)  # type: ignore[arg-type]
        return engine.asked[0]

    with span_collector.collecting(monkeypatch) as collected:
        asked = asyncio.run(run())
        collected.wait(lambda found: bool(found.named("generate")))
    (generate,) = collected.named("generate")
    assert generate.parent_span_id.hex() == parent
    assert attributes(generate)["strata.prefill_where"] == "local" and attributes(generate)["strata.api"] == "completions"
    # vLLM's own spans, if it makes any, are below the replica's.
    assert asked["trace_headers"] == {"traceparent": f"00-{trace}-{generate.span_id.hex()}-01"}
    for name in ("queue", "prefill", "decode"):
        (span,) = collected.named(name)
        assert span.parent_span_id == generate.span_id and span.start_time_unix_nano >= generate.start_time_unix_nano
    assert attributes(collected.named("decode")[0])["strata.tokens"] > 1


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """As `ask`, without parsers, and one replica for all tests."""
    monkeypatch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("shared")
    scripted_replica.write_model(folder)
    scripted_replica.install(monkeypatch, "hello")
    numbers = itertools.count()
    with asyncio.Runner() as runner:
        replica, _ = runner.run(scripted_replica.replica(monkeypatch, folder))

        def answered(*calls: Call) -> list[Call]:
            for call in calls:
                call.meta["request_id"] = str(next(numbers))
                runner.run(replica.handle(call))  # type: ignore[arg-type]
            return list(calls)

        yield answered
    monkeypatch.undo()
