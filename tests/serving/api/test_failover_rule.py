"""The rule for continuing a stream on another replica: each reason against it, and the requests just beside."""

from typing import Any

import pytest

from strata.serving.api.dialects import messages, responses
from strata.serving.api.failover import obstacle

SEQUENCES, PROMPTS, GUIDED = "several sequences (n > 1)", "several prompts", "guided decoding"
PENALTIES, SEED = "frequency or presence penalties", "sampling with a seed"
TOOL = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({}, None),
        ({"prompt": "x", "max_tokens": 3, "temperature": 0.7, "top_p": 0.5, "stop": ["x"], "logprobs": 2}, None),
        # Several sequences
        ({"n": None}, None),
        ({"n": 1}, None),
        ({"n": 2}, SEQUENCES),
        ({"n": 1, "use_beam_search": True}, SEQUENCES),
        ({"use_beam_search": False}, None),
        # Several prompts
        ({"prompt": []}, None),
        ({"prompt": ["x"]}, None),
        ({"prompt": ["x", "y"]}, PROMPTS),
        ({"prompt": [[1, 2]]}, None),
        ({"prompt": [[1, 2], [3]]}, PROMPTS),
        ({"prompt": [1, 2, 3]}, None),  # one prompt of token ids
        ({"prompt": "xyz"}, None),
        ({"prompt": None}, None),
        # Guided decoding
        ({"structured_outputs": {"regex": "a"}}, GUIDED),
        ({"structured_outputs": None}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {}}, None),
        ({"response_format": {"type": "json_object"}}, GUIDED),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, GUIDED),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, GUIDED),
        # Tools: a forced call is guided
        ({"tools": TOOL}, None),
        ({"tools": TOOL, "tool_choice": "auto"}, None),
        ({"tools": TOOL, "tool_choice": "none"}, None),
        ({"tools": TOOL, "tool_choice": "required"}, GUIDED),
        ({"tools": TOOL, "tool_choice": {"type": "function", "function": {"name": "f"}}}, GUIDED),
        ({"tools": [], "tool_choice": "required"}, None),
        ({"tool_choice": "required"}, None),
        # Penalties
        ({"frequency_penalty": 0.5}, PENALTIES),
        ({"presence_penalty": -0.5}, PENALTIES),
        ({"frequency_penalty": 0, "presence_penalty": 0.0}, None),
        ({"repetition_penalty": 1.1}, None),  # counts prompt and generated tokens alike
        # Bad words
        ({"bad_words": ["x"]}, "bad_words"),
        ({"bad_words": []}, None),
        # Seed
        ({"seed": 0}, SEED),
        ({"seed": 7}, SEED),
        ({"seed": 7, "temperature": 1}, SEED),
        ({"seed": 7, "temperature": 0.1}, SEED),
        ({"seed": 7, "temperature": None}, SEED),
        ({"seed": 7, "temperature": 0}, None),
        ({"seed": None, "temperature": 1}, None),
    ],
)
def test_reason_against_continuing_a_stream(request_: dict[str, Any], reason: str | None) -> None:
    assert obstacle(request_) == reason


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"input": "x", "temperature": 0.7, "tools": TOOL}, None),
        ({"text": None}, None),
        ({"text": {"format": None}}, None),
        ({"text": {"format": {"type": "text"}}}, None),
        ({"text": {"format": {"type": "json_object"}}}, GUIDED),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, GUIDED),
        ({"tools": TOOL, "tool_choice": "required"}, GUIDED),
        ({"presence_penalty": 1}, PENALTIES),
        ({"seed": 1}, SEED),
        ({"seed": 1, "temperature": 0}, None),
    ],
)
def test_responses(request_: dict[str, Any], reason: str | None) -> None:
    assert responses.obstacle(request_) == reason


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"messages": [], "temperature": 0.7, "tools": TOOL}, None),
        ({"tools": TOOL, "tool_choice": None}, None),
        ({"tools": TOOL, "tool_choice": {"type": "auto"}}, None),
        ({"tools": TOOL, "tool_choice": {"type": "none"}}, None),
        ({"tools": TOOL, "tool_choice": {"type": "any"}}, GUIDED),
        ({"tools": TOOL, "tool_choice": {"type": "tool", "name": "f"}}, GUIDED),
        ({"tool_choice": {"type": "any"}}, None),
        ({"output_config": None}, None),
        ({"output_config": {"effort": "low"}}, None),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, GUIDED),
    ],
)
def test_messages(request_: dict[str, Any], reason: str | None) -> None:
    assert messages.obstacle(request_) == reason
