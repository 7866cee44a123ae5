"""Validation of requests before they reach an engine. Without vLLM: stand-ins replace its request classes."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel
from support import within
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from strata.serving.api import limits, openapi, requests, vllm_messages
from strata.serving.api.grammar_trial import GrammarTrial
from strata.serving.api.requests import ApiError, parse, validate


def refusal(body: bytes) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.status == 400 == caught.value.body["error"]["code"]
    json.dumps(caught.value.body).encode()
    return caught.value.body["error"]


def test_valid_request_is_unchanged() -> None:
    tree = {
        "model": "m",
        "prompt": "é 😀 \x00 kv_transfer_params",
        "stop": ["kv_transfer_params"],
        "seed": -(2**63),
        "top_p": 0.1,
    }
    assert parse(json.dumps(tree).encode()) == tree
    assert parse(b'{"prompt": ' + json.dumps(list(range(200_000))).encode() + b"}")["prompt"][-1] == 199_999


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a": "\xed\xa0\x80"}', "not valid JSON"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b'{"\\udc00x": 1}', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": -Infinity}', "not valid JSON"),
        (b'{"a": 1e400}', "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
        (b'{"seed": 9223372036854775808}', "'seed' has a number beyond 64 bits"),
        (b'{"prompt": [1, 18446744073709551616]}', "'prompt' has a number beyond 64 bits"),
        (b'{"a": [[{"b": -9223372036854775809}]]}', "'a' has a number beyond 64 bits"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "deeper than 64"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deeper than 64"),
        (b'{"a": ' + b"[" * 100_000, "deeper than 64"),
        (b'{"messages": [' + b"1," * 5000 + b"1]}", "'messages' has 5001 entries"),
        (b'{"prompt": [' + b"-1," * 5000 + b"1]}", "'prompt' has 5001 entries"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(5000)) + b"}", "5000 entries"),
        (b'{"a": [' + b",".join([b"[[],[],[]]"] * 4096) + b"]}", "lists and objects"),
    ],
)
def test_malformed_bodies_are_refused(body: bytes, says: str) -> None:
    assert says in refusal(body)["message"]


@pytest.mark.parametrize("name", sorted(requests.FORBIDDEN))
def test_forbidden_keys_are_refused_at_any_depth(name: str) -> None:
    key = name.encode()
    escaped = b"".join(b"\\u%04x" % letter for letter in key)
    for body in (
        b'{"%s": null}' % key,
        b'{"%s": 1, "%s": null}' % (key, key),
        b'{"%s": {}}' % escaped,
        b'{"vllm_xargs": {"%s": 1}}' % key,
        b'{"tools": ' + b"[" * 60 + b'{"%s": {}}' % key + b"]" * 60 + b"}",
    ):
        assert refusal(body)["param"] == name


@pytest.mark.parametrize("name", sorted(requests.UNSUPPORTED))
def test_unsupported_parameters_are_named(name: str) -> None:
    assert refusal(json.dumps({name: "x"}).encode())["param"] == name
    assert parse(json.dumps({name: None}).encode()) == {name: None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [' + b"[]," * 5_000_000 + b"1]}",
        b'{"prompt": [' + b"1," * 5_000_000 + b"1]}",
        b"{" + b'"":{},' * 2_000_000 + b'"":{}}',
        b'{"prompt": [' + b"-1," * 1_000_000 + b"1]}",
        b'{"prompt": "' + b"\\u00e9" * 2_700_000 + b'"}',
    ],
)
def test_validation_of_the_largest_body_is_fast(body: bytes) -> None:
    assert len(body) < requests.MAX_BODY_BYTES
    with within(1):
        try:
            parse(body)
        except ApiError as error:
            assert error.status == 400


def test_error_bodies_are_bounded() -> None:
    error = ApiError(429, "x" * 10**6, param="y" * 10**6, headers={"retry-after": "1"})
    assert len(json.dumps(error.body)) < 2000
    assert error.headers == {"retry-after": "1"}


class Wanted(BaseModel):
    type: Literal["text", "json_object"]


class Generation(BaseModel):
    """Fields of vLLM's requests that the checks read."""

    prompt: str | list[int] | list[str] | None = None
    n: int = 1
    use_beam_search: bool = False
    echo: bool = False
    logprobs: int | None = None
    length_penalty: float = 1.0
    temperature: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    min_tokens: int = 0
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: Wanted | None = None
    structured_outputs: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: str = "theirs"


def test_the_server_chooses_the_request_id() -> None:
    assert validate({"request_id": "mine"}, Generation).request_id not in ("mine", "theirs")


def test_unknown_parameters_do_not_become_attributes() -> None:
    class Open(BaseModel, extra="allow"):
        prompt: str

    assert not hasattr(validate({"prompt": "x", "length_penalty": None}, Open), "length_penalty")
    assert validate({"prompt": "x", "user": "me", "metadata": {"a": "b"}, "store": False, "best_of": 1}, Open).prompt == "x"
    with pytest.raises(ApiError, match=r"There is no parameter 'promt'\. Did you mean 'prompt'\?") as caught:
        validate({"prompt": "x", "promt": "y"}, Open)
    assert caught.value.body["error"]["param"] == "promt"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"best_of": "x"}, "best_of"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"store": True}, "store"),
    ],
)
def test_parameters_without_effect_are_refused(asked: dict[str, Any], param: str) -> None:
    assert refusal(json.dumps(asked).encode())["param"] == param


def test_default_values_of_unsupported_parameters_pass() -> None:
    tree = {"best_of": 2, "n": 2, "service_tier": "auto", "modalities": ["text"], "store": False, "user": "x", "metadata": {}}
    assert parse(json.dumps(tree).encode()) == tree


@pytest.mark.parametrize("role", ["alien", "", None, 5, ["user"], "function", "User", "x" * 10**5])
def test_unknown_roles_are_refused(role: Any) -> None:
    with pytest.raises(ApiError, match="'role' must be one of system, developer, user, assistant, tool, not") as caught:
        validate({"messages": [{"role": "user", "content": "x"}, {"role": role, "content": "x"}]}, Generation)
    assert caught.value.status == 400 and caught.value.body["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, "invalid_request_error") for status in (400, 405, 408, 413, 422, 431)),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "service_unavailable_error"),
    ],
)
def test_error_type_follows_the_status(status: int, kind: str) -> None:
    assert ApiError(status, "x", param="y").body == {"error": {"message": "x", "type": kind, "param": "y", "code": status}}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            '"auto" tool choice requires serve.tool_parser to be set',
        ),
        (
            'tool_choice="required" requires --tool-call-parser to be set',
            'tool_choice="required" requires serve.tool_parser to be set',
        ),
        ("Please set --reasoning-parser and/or --reasoning-config to use it.", "Please set serve.reasoning_parser to use it."),
        ("by setting --limit-mm-per-prompt at startup", "by setting serve.engine.limit_mm_per_prompt at startup"),
        ("n must be 1. (parameter=n, value=(1\n))", "n must be 1."),
        ("no flags -- here, a--b, 1--2", "no flags -- here, a--b, 1--2"),
    ],
)
def test_vllm_errors_name_recipe_keys(theirs: str, ours: str) -> None:
    assert vllm_messages.translate(theirs) == ours


def test_vllm_errors_in_a_stream_are_translated() -> None:
    theirs = {"error": {"message": "set --tool-call-parser", "type": "BadRequestError", "param": None, "code": 400}}
    error = vllm_messages.parse_error_event(f"data: {json.dumps(theirs)}\n\n")
    assert error is not None and error.body == ApiError(400, "set serve.tool_parser").body
    for event in ("data: [DONE]\n\n", 'data: {"id":"x","choices":[{"text":"{\\"error\\": 1}"}]}\n\n'):
        assert vllm_messages.parse_error_event(event) is None


def test_validation_names_the_parameter() -> None:
    with pytest.raises(ApiError) as caught:
        validate({"stop_token_ids": [1, "x"]}, Generation)
    assert caught.value.body["error"]["param"] == "stop_token_ids.1"


@pytest.mark.parametrize(
    "tree",
    [
        {"response_format": {"type": "structural_tag", "format": {}}},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}]},
    ],
)
def test_hostile_requests_are_refused_before_vllm_validates(tree: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        validate(tree, Generation)
    assert caught.value.body["error"]["param"] == next(iter(tree))


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"n": 65}, "n"),
        ({"n": 11, "use_beam_search": True}, "n"),
        ({"use_beam_search": True, "echo": True, "logprobs": 0}, "echo"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt"),
        ({"length_penalty": 1e308}, "length_penalty"),
        ({"length_penalty": "nan"}, "length_penalty"),
        ({"temperature": "inf"}, "temperature"),
        ({"logit_bias": {"5": "nan"}}, "logit_bias"),
        ({"top_k": "9" * 30}, "top_k"),
        ({"stop_token_ids": ["9" * 30]}, "stop_token_ids"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop": ["x" * 2000]}, "stop"),
        ({"bad_words": ["x" * 5000] * 2}, "bad_words"),
        ({"chat_template_kwargs": {"conversation": []}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, "bad_words"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
)
def test_parameters_beyond_limits_are_refused(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        limits.check(Generation.model_validate(asked), max_sequences=64)
    assert (caught.value.status, caught.value.body["error"]["param"]) == (400, param)


def test_useful_parameters_are_within_limits() -> None:
    for asked in (
        {"prompt": list(range(100_000))},
        {"prompt": ["x"] * 64, "n": 2},
        {"n": 10, "use_beam_search": True, "length_penalty": -1.0, "logprobs": 3},
        {"use_beam_search": True, "echo": True},
        {"echo": True, "logprobs": 3},
        {"stop": ["\n\n", "END"], "bad_words": ["x"], "min_tokens": 4, "logit_bias": {"5": -100}},
        {"response_format": {"type": "json_object"}, "logit_bias": {"5": 1}},
        {"response_format": {"type": "text"}, "min_tokens": 4},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        limits.check(Generation.model_validate(asked), max_sequences=64)


class Tokens(BaseModel):
    tokens: list[int]


def test_token_ids_beyond_the_tokenizer_are_refused() -> None:
    limits.check_tokenizing(Tokens(tokens=[0, 2**31 - 1]), 100)
    for tokens, size in (([2**31], 100), ([1], 2**21)):
        with pytest.raises(ApiError):
            limits.check_tokenizing(Tokens(tokens=tokens), size)


NULLABLE = "\n".join(["root ::= r60", 'r0 ::= "a" | ""', *(f"r{i} ::= r{i - 1} r{i - 1} | r{i - 1}" for i in range(1, 61))])
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}
TREE = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}


@pytest.mark.slow
def test_grammars_are_compiled_in_advance(tmp_path: Path) -> None:
    asyncio.run(try_grammars(tmp_path))


async def try_grammars(tmp_path: Path) -> None:
    letters = {chr(code): code - 31 for code in range(32, 127)} | {"<eos>": 0}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(letters, unk_token="<eos>")), eos_token="<eos>", unk_token="<eos>"
    )
    tokenizer.save_pretrained(tmp_path)
    trial = GrammarTrial(str(tmp_path), len(letters))
    for kind, text in (
        ("json", json.dumps(PERSON)),
        ("json", json.dumps(TREE)),
        ("regex", r"(\d{3})-(\d{4})"),
        ("regex", "(a+)+b"),
        ("grammar", 'root ::= "yes" | "no"'),
    ):
        assert await trial.fault([(kind, text)]) == "", text
    for kind, text, fault in (
        ("json", json.dumps({"type": "string", "pattern": "(" * 50_000 + ")" * 50_000}), "crashes"),
        ("json", json.dumps({"$ref": "#"}), "no text can satisfy it"),
        ("json", json.dumps({"type": "alien"}), "alien"),
        ("regex", "(", "parenthesis"),
        ("regex", "x" * 200_000, "characters"),
        ("grammar", NULLABLE, "needs more than 2 s"),
        ("grammar", "root ::= root", "no text can satisfy it"),
        ("grammar", "\x00{{", "root rule"),
    ):
        assert fault in await trial.fault([(kind, text)]), text[:50]
    # The helper lives on, and remembers.
    assert await trial.fault([("regex", "ab*")]) == ""
    began = time.monotonic()
    assert "needs more than" in await trial.fault([("grammar", NULLABLE)])
    assert time.monotonic() - began < 1, "it was tried again, which takes two seconds"
    await trial.stop()


def test_openapi_document_describes_accepted_requests() -> None:
    document = openapi.document(["m"])
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    asked = {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 4,
        "stop": ["x"],
        "response_format": {"type": "json_object"},
        "seed": -1,
    }
    jsonschema.validate(asked, schemas["CompletionRequest"])
    for wrong in ({"prompt": [-1]}, {"prompt": "x", "temperature": 3}, {"prompt": "x", "n": 129}, {"model": "z", "prompt": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schemas["CompletionRequest"])
    jsonschema.validate(ApiError(404, "no").body, schemas["Error"])
