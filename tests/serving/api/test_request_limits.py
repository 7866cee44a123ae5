"""Limits on requests, from both sides: the largest request that passes, and the smallest that is refused."""

import json
import time
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from pydantic import BaseModel, model_validator

from strata.serving.api import limits, requests, vllm_messages
from strata.serving.api.requests import ApiError, nesting, parse, validate


def refused(call: Any, *arguments: Any) -> dict[str, Any]:
    """Error object of a refusal."""
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    assert caught.value.status == 400 and caught.value.headers == {}
    error: dict[str, Any] = caught.value.body["error"]
    assert error["code"] == 400 and error["type"] == "invalid_request_error"
    return error


# Bodies


def nested(levels: int) -> bytes:
    """Object whose lists nest so that the object and the lists are `levels` deep."""
    return b'{"a": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_sixty_four_levels_are_allowed() -> None:
    assert parse(nested(64))
    assert "nested deeper than 64 levels" in refused(parse, nested(65))["message"]


def test_a_list_has_at_most_4096_entries() -> None:
    assert len(parse(json.dumps({"stop": ["x"] * 4096}).encode())["stop"]) == 4096
    error = refused(parse, json.dumps({"stop": ["x"] * 4097}).encode())
    assert error["message"] == "'stop' has 4097 entries; 4096 are allowed." and error["param"] == "stop"


def test_a_request_has_at_most_4096_parameters() -> None:
    body = {f"p{number}": 1 for number in range(4096)}
    assert parse(json.dumps(body).encode()) == body
    error = refused(parse, json.dumps(body | {"q": 1}).encode())
    assert error["message"] == "The request has 4097 entries; 4096 are allowed." and error["param"] is None


def containers(count: int) -> bytes:
    """Request with `count` lists below its top level: 4 lists with 4094 empty ones each, and the rest."""
    rest = count - 4 * 4095 - 1
    return json.dumps({**{f"p{number}": [[]] * 4094 for number in range(4)}, "rest": [[]] * rest}).encode()


def test_a_request_has_at_most_16384_lists_and_objects() -> None:
    assert parse(containers(16_384))
    assert refused(parse, containers(16_385))["message"] == "The JSON of the request has more than 16384 lists and objects."


def test_containers_of_all_levels_are_summed() -> None:
    wide = {"p": [[[]] for _ in range(4096)], "q": [[[]] for _ in range(4095)]}  # 2 + 8191 + 8191
    assert parse(json.dumps(wide).encode())
    wide["q"].append([[]])
    assert "16384" in refused(parse, json.dumps(wide).encode())["message"]


def test_a_prompt_has_at_most_a_million_token_ids() -> None:
    assert requests.MAX_VALUES == 1_048_576
    body = b'{"prompt": [' + b"1," * 1_048_574 + b"1" + b"]" + b',"n":1}'
    assert body.count(b",") == 1_048_575
    assert len(parse(body)["prompt"]) == 1_048_575
    assert "1048576 values" in refused(parse, body[:-1] + b',"m":1}')["message"]


@pytest.mark.parametrize("letter", ["[", "{", ":"])
def test_a_body_has_at_most_131072_brackets_and_colons(letter: str) -> None:
    def body(count: int) -> bytes:
        return json.dumps({"prompt": letter * (count - 4), "stop": ["x"]}).encode()  # a brace, a bracket and two colons

    assert parse(body(131_072))
    assert "131072 lists and keys" in refused(parse, body(131_073))["message"]


def test_brackets_of_all_kinds_reach_the_limit_exactly() -> None:
    text = "[" * 40_000 + "{" * 40_000 + ":" * (131_072 - 80_000 - 2)  # and the object's own brace and colon
    assert parse(json.dumps({"prompt": text}).encode())
    refused(parse, json.dumps({"prompt": text + ":"}).encode())


def test_the_limits_of_a_body() -> None:
    assert requests.MAX_BODY_BYTES == 16_777_216


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"seed": 9223372036854775807, "top_k": -9223372036854775808}', None),
        (b'{"seed": 9223372036854775808}', "seed"),
        (b'{"seed": -9223372036854775809}', "seed"),
        (b'{"prompt": [3, 9223372036854775807, 5]}', None),
        (b'{"prompt": [3, 9223372036854775808, 5]}', "prompt"),
        (b'{"prompt": [[1], [2, 9223372036854775808]]}', "prompt"),
        (b'{"tokens": [9223372036854775808]}', "tokens"),
        (b'{"logit_bias": {"5": 9223372036854775808}}', "logit_bias"),
        (b'{"a": {"b": [0, 9223372036854775808]}}', "a"),
        (b'{"seed": 1e300}', None),
    ],
)
def test_integers_have_64_bits(body: bytes, param: str | None) -> None:
    if param is None:
        parse(body)
        return
    error = refused(parse, body)
    assert (error["param"], error["message"]) == (param, f"'{param}' has a number beyond 64 bits.")


IDS = list(range(5000))


@pytest.mark.parametrize(
    "tree",
    [{"prompt": IDS}, {"prompt": [IDS, IDS]}, {"tokens": IDS}, {"prompt": [0] * 5000}],
    ids=["one", "two", "tokens", "zero"],
)
def test_prompts_of_token_ids_may_be_long(tree: dict[str, Any]) -> None:
    assert parse(json.dumps(tree).encode()) == tree


@pytest.mark.parametrize(
    "tree",
    [
        {"prompt": [[IDS]]},
        {"tokens": [IDS]},
        {"ids": IDS},
        {"a": {"prompt": IDS}},
        {"a": {"tokens": IDS}},
        {"prompt": [*IDS, -1]},
        {"prompt": [*IDS, True]},
        {"prompt": [*IDS, 0.5]},
        {"prompt": [*IDS, "x"]},
        {"prompt": dict.fromkeys(map(str, IDS), 1)},
    ],
    ids=range(10),
)
def test_other_long_lists_are_refused(tree: dict[str, Any]) -> None:
    error = refused(parse, json.dumps(tree).encode())
    assert "entries; 4096 are allowed" in error["message"] and error["param"] == next(iter(tree))


def test_forbidden_keys_are_found_on_the_deepest_level() -> None:
    body = b'{"a": ' + b"[" * 62 + b'{"kv_transfer_params": 1}' + b"]" * 62 + b"}"
    assert refused(parse, body)["param"] == "kv_transfer_params"


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"best_of": 1}, None),
        ({"best_of": 1, "n": None}, None),
        ({"best_of": 3, "n": 3}, None),
        ({"best_of": None, "n": 2}, None),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"service_tier": None}, None),
        ({"service_tier": "default"}, None),
        ({"service_tier": ""}, "service_tier"),
        ({"modalities": ["text"]}, None),
        ({"modalities": []}, None),
        ({"modalities": ["audio"]}, "modalities"),
        ({"suffix": ""}, None),
        ({"suffix": "text"}, "suffix"),
        ({"priority": 0}, None),
        ({"priority": 1}, "priority"),
    ],
)
def test_parameters_without_effect_pass_only_with_their_defaults(asked: dict[str, Any], refusal: str | None) -> None:
    body = json.dumps(asked).encode()
    if refusal is None:
        assert parse(body) == asked
    else:
        error = refused(parse, body)
        assert error["param"] == refusal and f"'{refusal}'" in error["message"]


# Errors


def test_messages_have_at_most_a_thousand_characters() -> None:
    assert ApiError(400, "x" * 1000).body["error"]["message"] == "x" * 1000
    assert ApiError(400, "y" * 1001).body["error"]["message"] == "y" * 1000 + "..."
    assert str(ApiError(400, "y" * 1001)) == "y" * 1000 + "..."


def test_names_of_parameters_have_at_most_a_hundred_characters() -> None:
    assert ApiError(400, "x", param="y" * 101).body["error"]["param"] == "y" * 100
    assert ApiError(400, "x").body["error"]["param"] is None


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (403, "permission_error"),
        (429, "rate_limit_error"),
        (503, "service_unavailable_error"),
        (504, "server_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
        (502, "server_error"),
    ],
)
def test_other_statuses_blame_the_client_below_500(status: int, kind: str) -> None:
    assert requests.error_type(status) == kind


# Validation


class Fields(BaseModel, extra="allow"):
    prompt: str = ""
    stop_token_ids: list[int] = []
    messages: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    request_id: str = "theirs"


def test_validation_errors_name_the_parameter() -> None:
    error = refused(validate, {"stop_token_ids": [1, "x"]}, Fields)
    assert error["param"] == "stop_token_ids.1" and error["message"].startswith("stop_token_ids.1: Input should be")


def test_errors_of_a_whole_model_name_no_parameter() -> None:
    class Strict(BaseModel):
        @model_validator(mode="after")
        def check(self) -> "Strict":
            raise ValueError("neither prompt nor messages")

    error = refused(validate, {}, Strict)
    assert error["param"] is None and error["message"] == "Value error, neither prompt nor messages"


class TheirError(Exception):
    """Error of vLLM: the parameter and the value follow the message."""

    parameter = "top_p"


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (TheirError("too high", "top_p", 3), "The request is not valid: too high", "top_p"),
        (TypeError("no string"), "The request is not valid: no string", None),
        (RuntimeError(), "The request is not valid: ", None),
    ],
)
def test_errors_of_vllms_validators_are_refusals(error: Exception, message: str, param: str | None) -> None:
    class Raises(BaseModel):
        @model_validator(mode="before")
        @classmethod
        def check(cls, tree: Any) -> Any:
            raise error

    found = refused(validate, {}, Raises)
    assert (found["message"], found["param"]) == (message, param)


def test_request_ids_are_generated_only_where_the_model_has_the_field() -> None:
    class Plain(BaseModel):
        prompt: str

    assert validate({"prompt": "x"}, Plain).model_dump() == {"prompt": "x"}
    first, second = (validate({}, Fields).request_id for _ in range(2))
    assert len(first) == 32 and first != second


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"promt": 1}, "There is no parameter 'promt'. Did you mean 'prompt'?"),
        ({"zzzzzz": 1}, "There is no parameter 'zzzzzz'."),
        ({"zb": 1, "za": 2}, "There is no parameter 'za'."),
        ({"z" * 60: 1}, f"There is no parameter '{'z' * 50}'."),
        ({"zero": 0}, "There is no parameter 'zero'."),
    ],
)
def test_unknown_parameters_are_refused(extra: dict[str, Any], message: str) -> None:
    assert refused(validate, extra, Fields)["message"] == message


def test_annotations_and_null_are_no_unknown_parameters() -> None:
    notes = dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), "x")
    checked = validate({**notes, "best_of": 1, "service_tier": "auto", "store": False, "anything": None}, Fields)
    assert checked.model_extra == {}


@pytest.mark.parametrize(
    ("tree", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, None),
        ({"response_format": "structural_tag"}, None),  # pydantic refuses it
        ({"structured_outputs": {"structural_tag": ""}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": None, "regex": "a"}}, None),
        ({"structured_outputs": ["structural_tag"]}, None),
        ({"messages": [{"role": "tool", "content": "x"}]}, None),
        ({"messages": ["x", {"role": "user", "content": ["x", {"text": "y"}]}]}, None),
        ({"messages": {"role": "alien"}}, None),
        ({"messages": [{"role": "alien"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal"}, {"type": "image"}]}]}, "messages"),
        *(
            ({"messages": [{"role": "user", "content": [{"type": kind}]}]}, None)
            for kind in ("text", "input_text", "output_text", "refusal", "thinking")
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 64}}]}]}, None),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 65}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": ["[" * 65]}}]}]}, None),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "[" * 65}]}]}, None),
    ],
)
def test_parameters_that_vllm_acts_on_are_checked_before(tree: dict[str, Any], param: str | None) -> None:
    if param is None:
        validate(tree, Fields)
    else:
        assert refused(validate, tree, Fields)["param"] == param


def test_refused_values_are_quoted_up_to_fifty_characters() -> None:
    role = refused(validate, {"messages": [{"role": "r" * 60}]}, Fields)["message"]
    assert role.endswith(f"not '{'r' * 50}'.")
    kind = refused(validate, {"messages": [{"role": "user", "content": [{"type": "k" * 60}]}]}, Fields)["message"]
    assert f"'{'k' * 50}'" in kind


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("", 0),
        ("x", 0),
        ("{}", 1),
        ("[]{}[]", 1),
        ('{"a": [1, {"b": 2}]} ', 3),
        ("[[][[", 3),
        ("[[]][[[", 3),
        # A parser ends at a bracket that closes nothing.
        ("][[", 0),
        ("[]}[[[", 1),
        # Brackets within strings are text. Closing ones must not hide the depth.
        ('"[[["', 0),
        ('["]]]]", [[["}"]]]]', 4),
        ('["]", ["]", ["]", [', 4),
        (r'["\"]]", [["\\", [', 4),
        ('[["\n]]', 2),
        ('["]\\', 1),
    ],
)
def test_nesting_is_the_deepest_level(text: str, depth: int) -> None:
    assert nesting(text) == depth


@pytest.mark.parametrize("text", ['""' * 10**6, '"' + r"\"" * 10**6, "]" * 10**6, '"' + "\\" * (10**6 + 1), "[]" * 10**5])
def test_nesting_is_found_in_linear_time(text: str) -> None:
    began = time.process_time()
    assert nesting(text) <= 1
    assert time.process_time() - began < 5, "a quadratic search would need hours"


# Limits of vLLM's parameters


class Format(BaseModel):
    type: Literal["text", "json_object"]


@dataclass
class Repetition:
    max_pattern_size: int = 0
    min_count: int = 0


class Generation(BaseModel, arbitrary_types_allowed=True):
    """Fields of vLLM's requests that the checks read."""

    prompt: Any = None
    messages: Any = None
    tools: Any = None
    n: int | None = 1
    use_beam_search: bool = False
    echo: bool = False
    logprobs: int | None = None
    length_penalty: float = 1.0
    temperature: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    bad_words: list[str] | None = []
    min_tokens: int = 0
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: Format | None = None
    structured_outputs: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    repetition_detection: Any = None
    tokens: list[int] | None = None


def outcome(asked: dict[str, Any], max_sequences: int = 1000) -> str | None:
    """Parameter that the check refuses, None if it passes."""
    try:
        limits.check(Generation(**asked), max_sequences)
    except ApiError as error:
        assert error.status == 400
        param: str | None = error.body["error"]["param"]
        return param
    return None


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"n": 128}, None),
        ({"n": 129}, "n"),
        ({"n": None}, None),
        ({"n": 10, "use_beam_search": True}, None),
        ({"n": 11, "use_beam_search": True}, "n"),
        ({"use_beam_search": True, "echo": True, "logprobs": 0}, "echo"),
        ({"use_beam_search": True, "echo": True}, None),
        ({"use_beam_search": True, "logprobs": 0}, None),
        ({"echo": True, "logprobs": 0}, None),
        ({"prompt": ["x"] * 128}, None),
        ({"prompt": ["x"] * 128, "n": None}, None),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": [[1]] * 43, "n": 3}, "prompt"),  # 129 sequences
        ({"prompt": [[1]] * 42, "n": 3}, None),
        ({"prompt": [1] * 500, "n": 3}, None),
        ({"prompt": "x" * 500, "n": 3}, None),
        ({"prompt": [], "n": 3}, None),
        ({"length_penalty": 10}, None),
        ({"length_penalty": -10}, None),
        ({"length_penalty": 10.01}, "length_penalty"),
        ({"length_penalty": -10.01}, "length_penalty"),
        ({"stop": "x" * 1024}, None),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ["x" * 1024] * 3}, None),
        ({"stop": ["x", "x" * 1025, "x"]}, "stop"),
        ({"stop": []}, None),
        ({"stop": None, "bad_words": None}, None),
        ({"bad_words": ["x" * 4096] * 2}, None),
        ({"bad_words": ["x" * 4096, "x" * 4096, "x"]}, "bad_words"),
        ({"tokens": [2**31 - 1]}, None),
        ({"tokens": [5, 2**31, 5]}, "tokens"),
        ({"tokens": []}, None),
        ({"repetition_detection": Repetition(256)}, None),
        ({"repetition_detection": Repetition(257)}, "repetition_detection"),
        ({"chat_template_kwargs": {}}, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, None),
        *(
            ({"chat_template_kwargs": {name: 1}}, "chat_template_kwargs")
            for name in ("model_config", "tokenizer", "conversation", "messages", "tools", "chat_template", "tokenize")
        ),
    ],
)
def test_each_limit_from_both_sides(asked: dict[str, Any], param: str | None) -> None:
    assert outcome(asked) == param


@pytest.mark.parametrize(
    ("asked", "max_sequences", "param"),
    [
        ({"n": 6}, 6, None),
        ({"n": 7}, 6, "n"),
        ({"n": 6, "use_beam_search": True}, 6, None),
        ({"n": 7, "use_beam_search": True}, 6, "n"),
        ({"prompt": ["x"] * 20, "n": 2}, 6, None),  # prompts beyond the engine's sequences wait
    ],
)
def test_n_is_at_most_the_sequences_of_the_engine(asked: dict[str, Any], max_sequences: int, param: str | None) -> None:
    assert outcome(asked, max_sequences) == param


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["temperature", "length_penalty", "logit_bias"])
def test_numbers_are_finite(place: str, number: float) -> None:
    assert outcome({place: {"5": 1.0, "6": number} if place == "logit_bias" else number}) == place


@pytest.mark.parametrize(("number", "fits"), [(2**63 - 1, True), (2**63, False), (-(2**63), True), (-(2**63) - 1, False)])
def test_numbers_have_64_bits_wherever_they_are(number: int, fits: bool) -> None:
    for asked in (
        {"top_k": number},
        {"stop_token_ids": [1, number]},
        {"structured_outputs": {"a": 1, "b": number}},
        {"structured_outputs": Repetition(1, number)},
        {"structured_outputs": Repetition(1, [1, number])},
    ):
        assert outcome(asked) == (None if fits else next(iter(asked))), asked


def test_prompts_messages_and_tools_are_checked_elsewhere() -> None:
    assert outcome({"prompt": [2**63], "messages": [2**63], "tools": [2**63]}) is None


GRAMMARS = ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}})
MASKS = ({"allowed_token_ids": [1]}, {"bad_words": ["a"]}, {"min_tokens": 1})


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_cannot_be_combined_with_a_grammar(grammar: dict[str, Any], mask: dict[str, Any]) -> None:
    assert outcome(grammar) is None and outcome(mask) is None
    assert outcome({**mask, "response_format": {"type": "text"}}) is None
    assert outcome(grammar | mask) == next(iter(mask))


def test_tokenize_bodies_have_at_most_a_mebibyte() -> None:
    limits.check_tokenizing(Generation(), 1_048_576)
    error = refused(limits.check_tokenizing, Generation(), 1_048_577)
    assert error["param"] == "prompt" and "1048577 were sent" in error["message"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tokens": [2**31]}, "tokens"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        ({"n": 1000, "stop": "x" * 2000}, None),  # generates nothing
    ],
)
def test_tokenize_requests_are_checked_for_numbers_and_the_template(asked: dict[str, Any], param: str | None) -> None:
    if param is None:
        limits.check_tokenizing(Generation(**asked), 10)
    else:
        assert refused(limits.check_tokenizing, Generation(**asked), 10)["param"] == param


# Errors of vLLM


@dataclass
class ErrorInfo:
    code: int
    message: str
    param: str | None


def test_vllms_refusals_are_translated() -> None:
    error = vllm_messages.refusal(ErrorInfo(404, "Set --max-model-len 5 or --dtype.", "model"))
    assert error.status == 404 and error.body["error"]["param"] == "model"
    assert str(error) == "Set serve.engine.max_model_len 5 or serve.engine.dtype."


def test_an_error_event_has_the_status_and_parameter() -> None:
    event = 'data: {"error": {"message": "bad (parameter=n, value=3)", "type": "x", "param": "n", "code": 422}}\n\n'
    error = vllm_messages.parse_error_event(event)
    assert error is not None and (error.status, str(error), error.body["error"]["param"]) == (422, "bad", "n")
    assert vllm_messages.parse_error_event('data: {"id": {"error": 1}}\n\n') is None
