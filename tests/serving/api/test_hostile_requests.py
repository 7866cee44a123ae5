"""Malformed, hostile and random requests, sent concurrently with plain streams.

None may be answered with a 5xx, end a process, delay a stream by more than 2 s, or leak memory, descriptors or blocks.
STRATA_HOSTILE sets the number of requests (10000 for a full run) and STRATA_HOSTILE_JSON a file for the results. Each run draws
a new seed, which the summary of the run prints. STRATA_FUZZ_SEED sets it, to repeat a run.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import schemathesis
from beside import as_json, measuring
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from raw_http import Raw, nearly_http, throw
from schemathesis import GenerationMode
from support import Served

from strata.serving.api.dialects import errors, openapi
from strata.serving.api.requests import ApiError, error_type

SEED = int(os.environ.get("STRATA_FUZZ_SEED") or random.SystemRandom().randrange(2**32))
REQUESTS = int(os.environ.get("STRATA_HOSTILE", "1000"))
LONGEST_PAUSE_S = 2.0
MOST_GROWN_MIB = 300
AT_ONCE = 24
SLACK = 4  # open files of one process
MODEL = "tiny"
TEXT = "import os\n"


@dataclass(frozen=True)
class Shot:
    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


def shot(path: str, tree: Any, **headers: str) -> Shot:
    return Shot(path, json.dumps(tree).encode("utf-8", "surrogatepass"), headers=headers)


def completion(**extra: Any) -> Shot:
    return shot("/v1/completions", {"model": MODEL, "prompt": TEXT, "max_tokens": 1} | extra)


def chat(**extra: Any) -> Shot:
    return shot(
        "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 1} | extra
    )


def says(content: Any, role: Any = "user", **extra: Any) -> Shot:
    return chat(messages=[{"role": role, "content": content} | extra])


def grammar(**wanted: Any) -> Shot:
    return completion(structured_outputs=wanted)


def tool(parameters: Any, choice: Any = "required", name: Any = "f") -> Shot:
    return chat(tools=[{"type": "function", "function": {"name": name, "parameters": parameters}}], tool_choice=choice)


HUGE = "9" * 30  # pydantic makes a number of it
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
NULLABLE = "\n".join(["root ::= r60", 'r0 ::= "a" | ""', *(f"r{i} ::= r{i - 1} r{i - 1} | r{i - 1}" for i in range(1, 61))])
BRACKETS = "(" * 50_000 + ")" * 50_000


def image(url: str) -> Shot:
    return says([{"type": "image_url", "image_url": {"url": url}}])


# Each killed, stalled or broke a server of some version, or looks as if it could.
HOSTILE: list[Shot] = [
    *(completion(n=n, temperature=1) for n in (0, -1, 129, 16384, 2**62, HUGE, True, 1.5, None)),
    *(completion(n=n, use_beam_search=True) for n in (0, 2, 11, 10_000)),
    *(completion(use_beam_search=True, n=2, length_penalty=p) for p in (1e308, -1e308, "nan", "inf")),
    *(completion(use_beam_search=True, echo=True, logprobs=p) for p in (None, 0, 3, 218)),
    *(completion(use_beam_search=True, logprobs=p) for p in (0, 3, 218)),
    *(completion(max_tokens=t) for t in (0, -1, 2**62, HUGE, None, "1", 1.0)),
    *(completion(max_tokens=0, echo=True, logprobs=p) for p in (None, 0, 20, 21)),
    *(completion(logprobs=p) for p in (-2, -1, 21, 2**62, HUGE, True, "x")),
    *(completion(prompt_logprobs=p) for p in (-2, -1, 20, 21, HUGE)),
    *(chat(logprobs=True, top_logprobs=p) for p in (-2, -1, 20, 21, 2**62, "x")),
    *(
        completion(logit_bias={k: v})
        for k, v in (("999999", 5), ("-1", 5), ("x", 5), ("9" * 5000, 5), ("5", "nan"), ("5", 1e300))
    ),
    *(completion(temperature=t) for t in ("nan", "inf", -1, 3, 1e-300, 1e308)),
    *(completion(**{name: value}) for name in ("top_k", "min_tokens", "seed", "priority") for value in (HUGE, 2**62, -(2**62))),
    *(completion(repetition_penalty=p) for p in (0, 1e-300, 1e300, "nan")),
    *(completion(**{name: [value]}) for name in ("stop_token_ids", "allowed_token_ids") for value in (-1, 2**40, HUGE)),
    *(completion(logprobs=1, logprob_token_ids=ids) for ids in ([-1], [2**40], [1] * 1000)),
    completion(allowed_token_ids=[]),
    completion(stop=["x" * 10**6]),
    completion(stop=["x"] * 1000),
    completion(stop=[""]),
    completion(bad_words=["a " * 500_000]),
    completion(bad_words=[f"w{i}" for i in range(1000)]),
    completion(repetition_detection={"max_pattern_size": 10**9, "min_count": 2}),
    completion(repetition_detection={"max_pattern_size": HUGE, "min_count": 2}),
    *(completion(truncate_prompt_tokens=t) for t in (0, -1, -2, 2**62, HUGE)),
    *(
        completion(prompt=p)
        for p in ([], [[]], [""], "", ["x"] * 1000, [2**31], [2**40], [1, "x"], [[1], "x"], {"a": 1}, 5, None)
    ),
    # The model has the token ids 0 to 1023.
    *(
        completion(prompt=[5, t], stream=s)
        for t in (1023, 1024, 1025, 2**31 - 1, 2**32, 2**63 - 1, -1, 1024.0, "1024", True)
        for s in (0, 1)
    ),
    *(completion(prompt=[[5], [t]]) for t in (1023, 1024, 2**32, -1)),
    *(completion(prompt=[t], echo=True, logprobs=1) for t in (1023, 1024)),
    *(completion(logit_bias={str(t): 1}) for t in (1023, 1024, "1_024", " 1024 ", 2**32)),
    *(
        completion(**{name: [t], "min_tokens": 1})
        for name in ("stop_token_ids", "allowed_token_ids")
        for t in (1023, 1024, 2**31)
    ),
    *(completion(logprobs=1, logprob_token_ids=[t]) for t in (1023, 1024)),
    *(shot("/detokenize", {"tokens": [t]}) for t in (1023, 1024)),
    *(completion(best_of=n) for n in (0, 1, 5, "x", [])),
    completion(max_token=1),
    completion(prompt=[-1] * 100_000),
    completion(prompt=[1.5] * 100_000),
    completion(prompt="x" * 10**7),
    completion(prompt_embeds="AAAA"),
    completion(suffix="x"),
    completion(stream_options={"include_usage": True}),
    completion(stream=True, stream_options=5),
    completion(kv_transfer_params={"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]]}),
    completion(vllm_xargs={"kv_transfer_params": {"do_remote_prefill": True}}),
    completion(vllm_xargs={"a": [1, "b"]}),
    completion(model="gpt-5"),
    completion(model=["tiny"]),
    completion(model="tiny\x00"),
    completion(request_id="../../x", cache_salt="x", session_id="x" * 10**5),
    completion(thinking_token_budget=5),
    completion(logits_processors=["os.system"]),
    *(chat(messages=m) for m in ("x", [], [5], [[]], [{}] * 4096, [{"role": "user"}] * 4096, None, {})),
    *(says(TEXT, role=role) for role in ("alien", "", 5, None, "tool", "developer")),
    *(says(content) for content in (5, {}, [5], [{}], [{"type": "alien"}], [{"type": "text"}], [{"type": "text", "text": 5}])),
    *(image(url) for url in ("http://127.0.0.1:9/x", "file:///etc/passwd", "data:image/png;base64,AAAA", "gopher://x")),
    says([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]),
    says([{"type": "video_url", "video_url": {"url": "http://169.254.169.254/"}}]),
    says(None, role="assistant", tool_calls=5),
    says(
        None, role="assistant", tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 10**5}}]
    ),
    chat(chat_template="{% for a in range(10**9) %}{% for b in range(10**9) %}{% endfor %}{% endfor %}"),
    *(chat(chat_template_kwargs={key: []}) for key in ("conversation", "chat_template", "tools", "tokenize", "x")),
    chat(continue_final_message=True, add_generation_prompt=True),
    chat(continue_final_message=True, add_generation_prompt=False),
    chat(documents=[{"a": "b"}], mm_processor_kwargs={"a": 1}),
    chat(tools=[]),
    chat(tools=[{}] * 1000),
    chat(tool_choice="required"),
    tool({"type": "object"}, {"type": "function", "function": {"name": "g"}}),
    *(
        tool(parameters)
        for parameters in ({"type": "alien"}, {"type": 5}, LOOP, {"type": "string", "pattern": BRACKETS}, {}, None, 5)
    ),
    tool({"type": "object"}, name='"\\\n\x00'),
    *(
        grammar(json=s)
        for s in (LOOP, {"$ref": "#"}, {"$ref": "http://127.0.0.1:9/x"}, {"$ref": "#/no"}, {"type": 5}, "{", "[1]", "5")
    ),
    grammar(json='{"a":' * 2000 + "1" + "}" * 2000),
    grammar(json={"type": "string", "pattern": BRACKETS}),
    grammar(json={"type": "object", "patternProperties": {"^a": {"type": "string"}}}),
    grammar(json={"type": "array", "uniqueItems": True, "items": {"type": "integer"}}),
    grammar(json={"type": "string", "maxLength": 10**9}),
    grammar(json={"type": "array", "minItems": 10**9}),
    grammar(json={"type": "integer", "minimum": -1e300, "maximum": 1e300}),
    grammar(json={"enum": [f"x{i}" for i in range(4000)]}),
    *(
        grammar(regex=r)
        for r in ("(", "(a+)+b", r"(a)\1", "(?=a)b", "a{1000000000}", "((a{1,1000}){1,1000}){1,1000}", "\x00", "")
    ),
    *(grammar(regex=r) for r in (BRACKETS, "x" * 10**6, "|".join(f"x{i}" for i in range(50_000)), "(" * 50 + ".*" + ")*" * 50)),
    *(grammar(choice=c) for c in ([], [""], ['"\\\n\x00'], ["x" * 10**6])),
    *(
        grammar(grammar=g)
        for g in (NULLABLE, "root ::= root", 'root ::= "a" x\nx ::= x', "x", "", "\x00{{", 'start: "a" b\nb: "c"')
    ),
    grammar(regex="a", choice=["a"]),
    grammar(),
    grammar(json_object=False),
    grammar(structural_tag="{}"),
    completion(structured_outputs=[1]),
    completion(structured_outputs={"regex": "a+"}, response_format={"type": "json_object"}),
    completion(structured_outputs={"regex": "b+"}, allowed_token_ids=[5]),
    completion(structured_outputs={"regex": "a+"}, bad_words=["a"]),
    completion(structured_outputs={"regex": "a"}, min_tokens=1),
    completion(response_format={"type": "json_schema"}),
    completion(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
    completion(response_format={"type": "structural_tag", "structures": [], "triggers": []}),
    shot("/tokenize", {"prompt": "ab c" * 10**6}),
    *(
        shot("/tokenize", t)
        for t in ({}, {"prompt": [1]}, {"prompt": None}, {"messages": 5}, {"messages": [5]}, {"model": "z", "prompt": "x"})
    ),
    *(shot("/detokenize", {"tokens": t}) for t in ([-1], [2**31], [2**40], [2**62], [HUGE], "abc", None, [None], [5] * 100_000)),
    *(
        Shot("/v1/completions", b)
        for b in (b"", b"null", b"{", b"[1]", b"\xff\xfe{}", b'{"a": NaN}', b'{"prompt": "\\ud800"}', b"\x00")
    ),
    Shot("/v1/completions", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    Shot("/v1/completions", b'{"model": "tiny", "prompt": "x", "prompt": {"kv_transfer_params": 1}}'),
    Shot("/v1/completions", b'{"prompt": "' + b"x" * (17 * 2**20) + b'"}'),
    Shot("/v1/completions", b'{"a": [' + b"[]," * 5_000_000 + b"1]}"),
    *(
        Shot(path, b"{}", method)
        for path in ("/v1/completions", "/health", "/nowhere")
        for method in ("GET", "PUT", "DELETE", "PATCH")
    ),
    *(
        Shot(path, b"{}")
        for path in ("/v1/responses/x", "/inference/v1/generate", "/v1/load_lora_adapter", "//", "/..%2f..%2fetc/passwd")
    ),
    *(Shot("/v1/models/" + name, b"", "GET") for name in ("x", "tiny%00", "..", "%ff", "tiny/x", "x" * 5000)),
    Shot(
        "/v1/completions", b"{}", headers={"content-type": "text/plain", "content-encoding": "gzip", "x-request-id": "x" * 5000}
    ),
]

# What is put in the place of a parameter.
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**63, 2**64, 10**30, 0.0, -0.0, 1e308, 5e-324, 0.5, 1e-12]),
    st.sampled_from(
        ["", "nan", "inf", "-inf", HUGE, "\x00", "\ud800", "null", "true", "0x10", "1e400", "tiny", "\u202e", "a\u0301" * 50]
    ),
    st.integers(-3, 300),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.lists(st.one_of(st.integers(-2, 2000), st.text(max_size=4), st.none(), st.floats(allow_nan=False)), max_size=6),
    st.dictionaries(st.text(max_size=6), st.one_of(st.integers(), st.text(max_size=4), st.none()), max_size=3),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
# What vLLM knows beyond our OpenAPI document.
# fmt: off
MORE = [
    "min_tokens", "length_penalty", "use_beam_search", "allowed_token_ids", "echo", "truncate_prompt_tokens",
    "truncation_side", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "add_special_tokens", "priority", "request_id", "session_id", "cache_salt", "return_tokens_as_token_ids",
    "return_token_offsets", "vllm_xargs", "kv_transfer_params", "repetition_detection", "thinking_token_budget",
    "stream_interval", "logprob_token_ids", "routed_experts_prompt_start", "best_of", "suffix", "prompt_embeds",
]
MORE_CHAT = [
    "parallel_tool_calls", "documents", "chat_template", "chat_template_kwargs", "mm_processor_kwargs",
    "media_io_kwargs", "reasoning_effort", "include_reasoning", "return_prompt_text", "return_assistant_tokens_mask",
    "messages",
]
MORE_RESPONSES = [
    "background", "previous_response_id", "previous_input_messages", "reasoning", "parallel_tool_calls", "prompt", "stop", "seed",
    "top_k", "logit_bias", "service_tier", "structured_outputs", "enable_response_messages", "skip_special_tokens", "cache_salt",
    "chat_template_kwargs", "repetition_penalty", "ignore_eos", "max_tool_calls", "kv_transfer_params", "session_id", "priority",
]
MORE_MESSAGES = ["output_config", "cache_salt", "kv_transfer_params", "vllm_xargs", "chat_template_kwargs", "thinking"]
# fmt: on
SCHEMAS = openapi.document([MODEL])["components"]["schemas"]
FIELDS = {
    "/v1/completions": [*SCHEMAS["CompletionRequest"]["properties"], *MORE],
    "/v1/chat/completions": [*SCHEMAS["ChatRequest"]["properties"], *MORE, *MORE_CHAT],
    "/v1/responses": [*SCHEMAS["ResponseRequest"]["properties"], *MORE_RESPONSES],
    "/v1/messages": [*SCHEMAS["MessageRequest"]["properties"], *MORE_MESSAGES],
    "/v1/messages/count_tokens": list(SCHEMAS["CountRequest"]["properties"]),
    "/tokenize": [*SCHEMAS["TokenizeRequest"]["properties"], "messages", "return_token_strs", "add_generation_prompt"],
    "/detokenize": list(SCHEMAS["DetokenizeRequest"]["properties"]),
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": TEXT, "max_tokens": 1},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    "/v1/responses": {"model": MODEL, "input": TEXT, "max_output_tokens": 1},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": TEXT}]},
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [5, 6]},
}
PATHS = st.sampled_from(list(VALID))


@st.composite
def confused(draw: st.DrawFn) -> Shot:
    """Valid request with some of its parameters replaced."""
    path = draw(PATHS)
    changes = draw(st.dictionaries(st.sampled_from(FIELDS[path]), ODD, min_size=1, max_size=3))
    return shot(path, VALID[path] | changes)


@st.composite
def damaged(draw: st.DrawFn) -> Shot:
    """Bytes of a valid request, some of them changed, removed or duplicated."""
    path = draw(PATHS)
    body = bytearray(json.dumps(VALID[path]).encode())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body) - 1))
        body[at : at + draw(st.integers(0, 5))] = draw(st.binary(max_size=5))
        if not body:
            break
    return Shot(path, bytes(body))


@st.composite
def worded(draw: st.DrawFn) -> Shot:
    """Random Unicode prompt, including lone surrogates."""
    text = draw(st.text(st.characters(codec=None), min_size=1, max_size=60))
    return completion(prompt=text) if draw(st.booleans()) else says(text)


RANDOM = st.one_of(
    st.builds(Shot, PATHS, st.binary(max_size=200)),
    st.builds(lambda path, tree: shot(path, tree), PATHS, JSON),
)


def drawn(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """Examples that depend on the seed `number` alone."""
    found: list[Any] = []

    @seed(number)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found


def token_ids(folder: Path) -> list[Shot]:
    """Token ids at the boundaries of the embedding, the tokenizer and integers, in every field that accepts ids."""
    known = json.loads((folder / "config.json").read_text())
    embedded, context = known["vocab_size"], known["max_position_embeddings"]
    written = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    around = {edge + off for edge in (0, written, embedded, 2 * embedded) for off in (-2, -1, 0, 1)}
    ids = sorted(around | {2**bits + off for bits in (15, 16, 24, 31, 32, 53, 63, 64) for off in (-1, 0, 1)})
    found = []
    for each in ids:
        found += [completion(prompt=prompt) for prompt in ([each], [[each]], [5, each], [each, 5], [[5], [each]])]
        found += [
            completion(prompt=[5] * (context - 8) + [each]),  # long enough to be prefilled elsewhere
            completion(prompt=[each], stream=True),
            completion(prompt=[each], max_tokens=0, echo=True, logprobs=1),
            completion(prompt=[each], n=2, use_beam_search=True),
            completion(prompt=[each], prompt_logprobs=1),
            completion(logit_bias={str(each): 5}),
            chat(logit_bias={str(each): -100}),
            *(completion(**{name: [each]}) for name in ("stop_token_ids", "allowed_token_ids")),
            *(chat(**{name: [5, each]}) for name in ("stop_token_ids", "allowed_token_ids")),
            completion(logprobs=1, logprob_token_ids=[each]),
            shot("/detokenize", {"tokens": [each]}),
        ]
    for length in (context - 2, context - 1, context, context + 1, 4 * context):
        found += [completion(prompt=[5] * length, max_tokens=tokens) for tokens in (0, 1, 2, context)]
    return found


def from_the_schema(count: int, number: int) -> list[Shot]:
    """Requests of Schemathesis for each route, half of them valid by the schema."""
    routes = [result.ok() for result in schemathesis.openapi.from_dict(openapi.document([MODEL])).get_all_operations()]
    posts = [route for route in routes if any(body.media_type == "application/json" for body in route.body)]
    found: list[Shot] = []
    for route in routes:
        share = count // (2 * len(posts)) if route in posts else 5
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if route in posts else (GenerationMode.POSITIVE,):
            found += [_shot_of(case) for case in drawn(route.as_strategy(generation_mode=mode), share, number)]
    return found


def _shot_of(case: Any) -> Shot:
    asked = case.as_transport_kwargs(base_url="http://x")
    request = httpx.Request(asked["method"], asked["url"], params=asked.get("params"), json=asked.get("json"))
    body = asked["data"] if isinstance(asked.get("data"), bytes) else request.content
    if isinstance(tree := asked.get("json"), dict) and ("prompt" in tree or "messages" in tree):
        # A valid request is answered: let it be short.
        body = json.dumps(
            {key: value for key, value in tree.items() if key != "max_completion_tokens"} | {"max_tokens": 1}
        ).encode()
    if isinstance(tree, dict) and "input" in tree:
        body = json.dumps(tree | {"max_output_tokens": 1}).encode()
    return Shot(request.url.raw_path.decode(), body, asked["method"].upper(), {"content-type": "application/json"})


def shots(folder: Path, number: int = SEED) -> list[Shot | Raw]:
    found: list[Shot | Raw] = [*HOSTILE, *from_the_schema(REQUESTS // 10, number), *drawn(worded(), REQUESTS // 20, number)]
    boundaries = token_ids(folder)
    found += random.Random(number).sample(boundaries, min(len(boundaries), REQUESTS // 5))
    found += drawn(nearly_http(), REQUESTS // 10, number)
    left = REQUESTS - len(found)
    found += [*drawn(confused(), left // 2, number), *drawn(damaged(), left // 4, number)]
    found += drawn(RANDOM, REQUESTS - len(found), number)
    random.Random(number).shuffle(found)
    return found


def fire(url: str, rounds: list[Shot | Raw]) -> list[tuple[Shot | Raw, int, bytes]]:
    """Sends requests concurrently. Status 0 is no answer within the limit."""
    host, _, port = url.removeprefix("http://").rpartition(":")

    async def run() -> list[tuple[Shot | Raw, int, bytes]]:
        waiting = iter(rounds)
        answers: list[tuple[Shot | Raw, int, bytes]] = []

        async def one_after_another(client: httpx.AsyncClient) -> None:
            for each in waiting:
                if isinstance(each, Raw):
                    answers.append((each, *await throw(host, int(port), each)))
                    continue
                try:
                    answer = await client.request(each.method, url + each.path, content=each.body, headers=each.headers)
                    answers.append((each, answer.status_code, answer.content))
                except httpx.WriteError:
                    answers.append((each, 413, b""))  # the server closed while a body too large was on its way
                except httpx.HTTPError as error:
                    answers.append((each, 0, repr(error).encode()))

        limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
        async with httpx.AsyncClient(timeout=90, limits=limits) as client:
            await asyncio.gather(*(one_after_another(client) for _ in range(AT_ONCE)))
        return answers

    return asyncio.run(run())


def wrong(sent: Shot | Raw, status: int, body: bytes) -> str | None:
    """Fault in a response, or None."""
    if status == 0 or status >= 500:
        return f"status {status}"
    if b'"code":5' in body.replace(b" ", b"") and b"data:" in body:
        return "an error of the server's in the stream"
    if status >= 400 and body:
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            return "not OpenAI's error shape"
        if isinstance(sent, Shot) and sent.path.startswith("/v1/messages") and "code" not in error:
            expected = json.loads(errors.body("messages", ApiError(status, error["message"])))
            return None if json.loads(body) == expected else "not Anthropic's error shape"
        if not (
            isinstance(error["message"], str) and error["code"] == status and error.keys() == {"message", "type", "param", "code"}
        ):
            return "not OpenAI's error shape"
        if error["type"] != error_type(status):
            return "a type of its own"
        if re.search(r"--[a-z]+-[a-z]", error["message"]):
            return "a flag of vLLM's"
        if len(body) > 10_000:
            return "an error of more than 10,000 bytes"
    return None


def processes(served: Served) -> dict[int, psutil.Process]:
    """Processes of gateways, replicas and engines."""
    found = {}
    for process in served.process.children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if "ServeReplica:" in title or "VLLM::" in title:
            found[process.pid] = process
    return found


def open_files(pid: int) -> Counter[str]:
    """Open files by kind, without the numbers of sockets and pipes."""
    found: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[re.sub(r"[\d\[\]]+", "", str(entry.readlink()))] += 1
    return found


def cache_in_use(served: Served) -> dict[str, float]:
    text = httpx.get(f"{served.url}/metrics", timeout=30).text
    found = re.findall(r"^(strata_serve_kv_cache_usage(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    assert found, "no strata_serve_kv_cache_usage in /metrics"
    return {name: float(value) for name, value in found}


def until(done: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not (met := done()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return met


def greedy(served: Served) -> str:
    request = {"model": served.model, "prompt": "def close(self):\n", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json=request, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.fixture
def nothing_left_behind(endpoint: Served) -> Iterator[Callable[[], None]]:
    """Asserts after a test that processes and answers are the same, and that no block is in use and no more files are open.

    Yields a function that counts open files. Call it after the first requests: a replica opens some files with its first request
    of a kind, such as those of the grammar process.
    """
    answer, alive = greedy(endpoint), processes(endpoint)
    assert sum("VLLM::" in " ".join(process.cmdline()) for process in alive.values()) >= 1
    files: dict[int, Counter[str]] = {}

    def count_files() -> None:
        files.update({pid: open_files(pid) for pid in alive})

    yield count_files
    assert processes(endpoint).keys() == alive.keys(), "a process died"
    assert until(lambda: not any(cache_in_use(endpoint).values()), 60), cache_in_use(endpoint)

    def more_files() -> dict[str, Counter[str]]:
        more = {pid: open_files(pid) - files[pid] for pid in alive}
        return {" ".join(alive[pid].cmdline()).split()[0]: found for pid, found in more.items() if found.total() > SLACK}

    assert until(lambda: not more_files(), 30), more_files()
    assert greedy(endpoint) == answer


@pytest.mark.parametrize(
    "strategy", [confused(), damaged(), worded(), nearly_http(), RANDOM], ids=["confused", "damaged", "worded", "http", "random"]
)
def test_requests_depend_on_the_seed_alone(strategy: st.SearchStrategy[Any]) -> None:
    assert drawn(strategy, 20, 7) == drawn(strategy, 20, 7) != drawn(strategy, 20, 8)


def test_hostile_and_random_requests(
    endpoint: Served, nothing_left_behind: Callable[[], None], record_property: Callable[[str, object], None]
) -> None:
    record_property("STRATA_FUZZ_SEED", SEED)
    print(f"STRATA_FUZZ_SEED={SEED} repeats these requests.")
    rounds = shots(endpoint.folder)
    assert len(rounds) >= REQUESTS
    with measuring(endpoint) as beside:
        answers = fire(endpoint.url, rounds[: REQUESTS // 2])
        nothing_left_behind()
        answers += fire(endpoint.url, rounds[REQUESTS // 2 :])
    assert len(answers) == len(rounds)
    complaints = [
        f"{why}: {_brief(each)} -> {body[:200]!r}" for each, status, body in answers if (why := wrong(each, status, body))
    ]
    tally = Counter(status for _, status, _ in answers)
    print(f"{len(answers)} requests: {dict(sorted(tally.items()))}\n{beside}")
    if path := os.environ.get("STRATA_HOSTILE_JSON"):
        Path(path).write_text(json.dumps(as_json(tally, len(complaints), beside, SEED), indent=2))
    assert not complaints, "\n".join([f"{len(complaints)} complaints, STRATA_FUZZ_SEED={SEED}", *complaints[:20]])
    assert not beside.broken and beside.streams, beside.broken[:5]
    assert beside.longest_pause_s < LONGEST_PAUSE_S, beside
    assert max(beside.grown_mib().values()) < MOST_GROWN_MIB, beside
    assert tally[429] < len(answers) / 10, "most were turned away, not tried"


def _brief(each: Shot | Raw) -> str:
    return f"{each.data[:300]!r}" if isinstance(each, Raw) else f"{each.method} {each.path} {each.body[:300]!r}"


def request_bytes(body: bytes, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    return head.encode() + body


def test_slow_and_disconnecting_clients(endpoint: Served, nothing_left_behind: Callable[[], None]) -> None:
    nothing_left_behind()
    host, port = endpoint.url.removeprefix("http://").split(":")
    stream = completion(max_tokens=200, stream=True, ignore_eos=True).body
    whole = completion(max_tokens=200, ignore_eos=True).body

    def opened(data: bytes, read: int = 0) -> socket.socket:
        connection = socket.create_connection((host, int(port)), timeout=30)
        connection.sendall(data)
        if read:
            assert connection.recv(read)
        return connection

    slow = [
        *(opened(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a: ") for _ in range(20)),
        *(opened(request_bytes(b'{"prompt": "', 1000)) for _ in range(20)),
        *(opened(request_bytes(stream)) for _ in range(4)),  # never reads its stream
        *(opened(request_bytes(stream), read=64) for _ in range(8)),  # leaves in mid-stream
        *(opened(request_bytes(whole)) for _ in range(8)),  # leaves before the answer
        opened(b""),
    ]
    for _ in range(10):
        time.sleep(0.2)
        for connection in slow[:40]:
            connection.sendall(b"x")
    assert greedy(endpoint)  # the others do not notice
    for connection in slow:
        connection.close()
    for garbage in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n" * 1000,
        b"A" * 100_000,
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    ):
        with opened(garbage) as connection:
            connection.shutdown(socket.SHUT_WR)
            reply = connection.recv(4096)
            assert not reply or reply.split()[1].startswith(b"4"), (garbage[:20], reply[:200])
