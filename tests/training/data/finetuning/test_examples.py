"""Rows as examples: accepted forms, and errors that name the place and the example."""

from typing import Any

import pytest

from strata.platform.errors import UserError
from strata.training.data.finetuning.examples import EXCERPT, Chat, Completion, Example, Place, parse, text_example

from .tiny import assistant, user

PLACE = Place("a.jsonl", "line", 1234)


def chat(row: dict[str, Any]) -> Chat:
    [sequence] = parse(row, "chat", PLACE).sequences
    assert isinstance(sequence, Chat)
    return sequence


def test_every_turn_of_the_assistant_counts() -> None:
    found = chat({"messages": [user("a"), assistant("b"), user("c"), assistant("d")], "id": 7})
    assert found.counted == (1, 3)
    assert found.messages == ({"role": "user", "content": "a"}, assistant("b"), user("c"), assistant("d"))
    assert found.tools is None


def test_turn_with_weight_0_does_not_count() -> None:
    found = chat({"messages": [user("a"), assistant("b", weight=0), user("c"), assistant("d", weight=1)]})
    assert found.counted == (3,)
    assert all("weight" not in message for message in found.messages)


def test_messages_become_what_templates_expect() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, null]}'}}]
    rows = [
        user("a"),
        {"role": "assistant", "content": None, "tool_calls": calls, "audio": None},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        assistant("b", tool_calls=None),
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = chat({"messages": rows, "tools": tools})
    assert found.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None]}}}],
    }
    assert found.messages[2]["content"] == "one\ntwo"
    assert found.messages[3] == {"role": "assistant", "content": "b"}
    assert found.tools == tuple(tools) and found.counted == (1, 3)


@pytest.mark.parametrize("arguments", ["{}", "", {}, {"a": 1}])
def test_arguments_are_objects(arguments: object) -> None:
    call = {"name": "f", "arguments": arguments}  # without the wrapper of OpenAI
    found = chat({"messages": [user("a"), assistant("", tool_calls=[call])]})
    expected = arguments if isinstance(arguments, dict) else {}
    assert found.messages[1]["tool_calls"] == [{"name": "f", "arguments": expected}]


def test_reasoning_alone_is_a_turn() -> None:
    found = chat({"messages": [user("a"), {"role": "assistant", "reasoning_content": "hm"}]})
    assert found.messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "a"}, "has no 'messages' (it has: text)"),
        ({"messages": None}, "has no 'messages'"),
        ({}, "has no 'messages' (it has: none)"),
        ({"messages": []}, "has 'messages' that is an empty list"),
        ({"messages": "hello"}, "has 'messages' that is a string"),
        ({"messages": [user("a"), "b"]}, "has message 2 of 'messages' that is a string"),
        ({"messages": [{"content": "a"}]}, "has message 1 of 'messages' without a role"),
        ({"messages": [{"role": "", "content": "a"}]}, "has message 1 of 'messages' without a role"),
        ({"messages": [{"role": 1, "content": "a"}]}, "has message 1 of 'messages' without a role"),
        ({"messages": [user("a"), {"role": "assistant"}]}, "has message 2 of 'messages' with content that is null"),
        ({"messages": [user("a"), assistant({"x": 1})]}, "with content that is an object"),  # type: ignore[arg-type]
        ({"messages": [user("a"), assistant([{"type": "image"}])]}, "with content other than text"),  # type: ignore[arg-type]
        ({"messages": [user("a")]}, "has no turn of the assistant (roles: user)"),
        ({"messages": [user("a"), {"role": "model", "content": "b"}]}, "has no turn of the assistant (roles: user, model)"),
        ({"messages": [user("a"), assistant("b", weight=0)]}, "has weight 0 on every turn of the assistant"),
        ({"messages": [user("a"), assistant("b", weight=0.5)]}, "has a message with weight 0.5"),
        ({"messages": [user("a"), assistant("b", tool_calls={})]}, "with tool_calls that are an object"),
        ({"messages": [user("a"), assistant("b", tool_calls=[{}])]}, "with a tool call without a function's name"),
        ({"messages": [user("a"), assistant("b", tool_calls=["f"])]}, "with a tool call without a function's name"),
        (
            {"messages": [user("a"), assistant("", tool_calls=[{"name": "f", "arguments": "[1]"}])]},
            "with arguments of 'f' that are not a JSON object",
        ),
        (
            {"messages": [user("a"), assistant("", tool_calls=[{"name": "f", "arguments": "{"}])]},
            "with arguments of 'f' that are not a JSON object",
        ),
        ({"messages": [user("a"), assistant("b")], "tools": "f"}, "has tools that are not a list of objects"),
        ({"messages": [user("a"), assistant("b")], "tools": ["f"]}, "has tools that are not a list of objects"),
    ],
)
def test_bad_conversation_is_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as raised:
        chat(row)
    assert raised.value.cause.startswith("Line 1,234 of a.jsonl ") and problem in raised.value.cause
    assert ". The example: {" in raised.value.cause and raised.value.fix


def test_example_in_an_error_is_short() -> None:
    with pytest.raises(UserError) as raised:
        chat({"messages": [user("a" * 10_000)]})
    assert len(raised.value.cause) < 100 + EXCERPT


@pytest.mark.parametrize(
    ("row", "kind", "other"),
    [
        ({"chosen": [], "rejected": []}, "chat", "preference"),
        ({"prompt": "a", "completion": "b", "label": True}, "chat", "preference"),
        ({"messages": [], "label": True}, "completion", "preference"),
        ({"prompt": "a", "completion": "b"}, "chat", "completion"),
        ({"messages": []}, "completion", "chat"),
        ({"text": "a"}, "preference", "text"),
    ],
)
def test_another_kind_is_suggested(row: dict[str, Any], kind: Any, other: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(row, kind, PLACE)
    assert raised.value.fix == f"Set the kind to {other}, or fix the row."


def test_completions() -> None:
    assert parse({"prompt": "a", "completion": "b"}, "completion", PLACE).sequences == (Completion("a", "b"),)
    row = {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]}
    assert parse(row, "completion", PLACE).sequences == (Chat((*row["prompt"], *row["completion"]), (3,)),)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a"}, "has no 'completion'"),
        ({"completion": "a"}, "has no 'prompt'"),
        ({"prompt": "a", "completion": " \n"}, "has a blank completion"),
        ({"prompt": "a", "completion": [assistant("b")]}, "has a prompt that is a string and a completion that is a list"),
        ({"prompt": [user("a")], "completion": "b"}, "has a prompt that is a list and a completion that is a string"),
        ({"prompt": 1, "completion": 2}, "has a prompt that is a number and a completion that is a number"),
        ({"prompt": [user("a"), assistant("b")], "completion": [user("c")]}, "has no turn of the assistant"),
    ],
)
def test_bad_completion_is_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(row, "completion", PLACE)
    assert problem in raised.value.cause


PROMPT = [user("a"), assistant("b"), user("c")]
PAIR = (Chat((*PROMPT, assistant("d")), (3,)), Chat((*PROMPT, assistant("e")), (3,)))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PROMPT, "chosen": [assistant("d")], "rejected": [assistant("e")]},
        {"prompt": PROMPT, "chosen": [*PROMPT, assistant("d")], "rejected": [*PROMPT, assistant("e")]},
        {"chosen": [*PROMPT, assistant("d")], "rejected": [*PROMPT, assistant("e")]},
        {"prompt": "c", "chosen": [*PROMPT, assistant("d")], "rejected": [*PROMPT, assistant("e")]},
    ],
)
def test_forms_of_a_pair(row: dict[str, Any]) -> None:
    found = parse(row, "preference", PLACE)
    assert found.sequences == PAIR and found.label is None


def test_pair_of_strings() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": ""}
    assert parse(row, "preference", PLACE).sequences == (Completion("a", "b"), Completion("a", ""))


@pytest.mark.parametrize("label", [True, False])
def test_answer_with_a_label(label: bool) -> None:
    found = parse({"prompt": "a", "completion": "b", "label": label}, "preference", PLACE)
    assert found.sequences == (Completion("a", "b"),) and found.label is label
    found = parse({"prompt": [user("a")], "completion": [assistant("b")], "label": label}, "preference", PLACE)
    assert found.sequences == (Chat((user("a"), assistant("b")), (1,)),) and found.label is label
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    found = parse({"messages": messages, "label": label}, "preference", PLACE)
    assert found.sequences == (Chat(tuple(messages), (3,)),) and found.label is label


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "completion": "b", "label": 1}, "has a label that is a number"),
        ({"prompt": "a", "completion": "b", "label": None}, "has a label that is null"),
        ({"messages": [user("a"), assistant("b")], "label": "good"}, "has a label that is a string"),
        ({"messages": [user("a")], "label": True}, "has no turn of the assistant (roles: user)"),
        ({"prompt": "a", "completion": "b"}, "has no 'chosen'"),
        ({"prompt": "a", "chosen": "b"}, "has no 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "has the same chosen and rejected answer"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "has a blank chosen answer"),
        ({"chosen": "b", "rejected": "c"}, "has answers that are strings, but no prompt that is a string"),
        ({"prompt": [user("a")], "chosen": "b", "rejected": "c"}, "has answers that are strings, but no prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": [assistant("c")]}, "a chosen that is a string and a rejected that is a list"),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("x"), assistant("c")]},
            "has conversations without a common beginning",
        ),
        ({"chosen": PROMPT[:1], "rejected": PROMPT}, "has a chosen answer that is empty after the common prompt"),
        ({"chosen": [*PROMPT, assistant("d")], "rejected": PROMPT}, "has a rejected answer that is empty"),
        (
            {"chosen": [user("s"), user("a"), assistant("b")], "rejected": [user("s"), user("x"), assistant("b")]},
            "has a chosen answer that begins with the role 'user' after the common prompt",
        ),
        ({"prompt": PROMPT, "chosen": [user("d")], "rejected": [assistant("e")]}, "begins with the role 'user'"),
        ({"prompt": PROMPT, "chosen": [assistant("d")], "rejected": []}, "has 'rejected' that is an empty list"),
    ],
)
def test_bad_preference_is_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(row, "preference", PLACE)
    assert problem in raised.value.cause and raised.value.cause.startswith("Line 1,234 of a.jsonl ")


def test_hash_depends_on_the_content_alone() -> None:
    row = {"messages": [user("a"), assistant("b")]}
    other = {"messages": [{"content": "a", "role": "user"}, assistant("b", audio=None)], "id": 2}

    def value(row: dict[str, Any], place: Place = PLACE) -> int:
        return parse(row, "chat", place).content_hash()

    assert value(row) == value(other, Place("b.parquet", "row", 1))
    assert value(row) != value({"messages": [user("a"), assistant("c")]})
    assert value(row) != value({"messages": [user("a"), assistant("b")], "tools": [{"name": "f"}]})
    assert text_example("a", PLACE).content_hash() != text_example("b", PLACE).content_hash()
    labeled = [Example(PLACE, "", (Completion("a", "b"),), label).content_hash() for label in (None, True, False)]
    assert len(set(labeled)) == 3 and all(0 <= each < 2**64 for each in labeled)
