"""Rows of the generated data sets: format, determinism, held-out subjects, flaws of rejected answers, the check of answers."""

import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from strata.training.data import tokenizer as bpe
from strata.training.data.generated.rows import Flaw, Kind, check, rows

from .test_tasks import solved

COUNT = 600
KINDS = get_args(Kind)
LOUD = "Answer in capitals."
each_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: Kind, count: int = COUNT, seed: int = 0, held_out: bool = False) -> list[dict[str, Any]]:
    return list(rows(kind, count, seed, held_out))


def turns(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Requests with their answers, but for those with tools."""
    messages = [message for message in row["messages"] if message["role"] != "system"]
    return [] if "tools" in row else [(a["content"], b["content"]) for a, b in zip(messages[::2], messages[1::2], strict=True)]


# Determinism


@each_kind
def test_rows_depend_on_the_seed_and_their_number_only(kind: Kind) -> None:
    assert made(kind, 40) == made(kind, 90)[:40]
    assert made(kind, 40, seed=1) != made(kind, 40)
    assert made(kind, 40, held_out=True) != made(kind, 40)
    assert len({json.dumps(row) for row in made(kind)}) > 0.75 * COUNT


@pytest.mark.parametrize(
    ("kind", "digest"), [("chat", "03c49b655a919e4f"), ("preferences", "c0b751f2ad827108"), ("completions", "b73fc6bcdf2433f9")]
)
def test_rows_are_the_same_on_every_machine(kind: Kind, digest: str) -> None:
    """A change of the generator changes these, and every model and figure made from its data."""
    assert hashlib.blake2b(json.dumps(made(kind, 200)).encode(), digest_size=8).hexdigest() == digest


def test_preferences_have_the_prompts_of_chat() -> None:
    for chat, pair in zip(made("chat"), made("preferences"), strict=True):
        assert chat["messages"] == pair["prompt"] + pair["chosen"]
        assert chat.get("tools") == pair.get("tools") and chat["task"] == pair["task"]


# Format


def test_conversations_are_in_the_format_of_openai() -> None:
    for row in made("chat"):
        assert row.keys() <= {"messages", "tools", "task"}
        roles = [message["role"] for message in row["messages"]]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles in (["user", "assistant"] * (len(roles) // 2), ["user", "assistant", "tool", "assistant"])
        for message in row["messages"]:
            calls = message.get("tool_calls")
            assert (message["content"] is None) == (calls is not None)
            assert message["content"] is None or (message["content"] and message["content"] == message["content"].strip())
            if calls:
                [call] = calls
                [tool] = row["tools"]
                assert call["type"] == tool["type"] == "function" and call["function"]["name"] == tool["function"]["name"]
                assert json.loads(call["function"]["arguments"]).keys() == tool["function"]["parameters"]["properties"].keys()
                assert tool["function"]["parameters"]["required"] == ["city"]
            if message["role"] == "tool":
                assert message["tool_call_id"] == row["messages"][-3]["tool_calls"][0]["id"]


def test_conversations_have_many_forms() -> None:
    found = made("chat")
    assert sum(row["messages"][0]["role"] == "system" for row in found) > 0.3 * COUNT
    assert sum(row["messages"][0]["content"] == LOUD for row in found) > 0.05 * COUNT
    assert sum(len(turns(row)) > 1 for row in found) > 0.15 * COUNT
    assert sum(len(turns(row)) > 2 for row in found) > 0.03 * COUNT
    assert sum("tools" in row for row in found) > 0.05 * COUNT
    assert len(Counter(row["task"] for row in found)) == 15


def test_every_turn_has_its_right_answer() -> None:
    for row in made("chat"):
        loud = row["messages"][0]["content"] == LOUD
        word = ""
        for prompt, answer in turns(row):
            if prompt in ("Spell it.", "Now spell it."):  # the word of the turn before
                expected = "-".join(word)
            elif prompt in ("In capitals.", "Now in capitals."):
                expected = word.upper()
            else:
                expected = solved(prompt) or "no known request"
            assert answer == (expected.upper() if loud else expected)
            word = answer


def test_tools_are_used() -> None:
    calls = uses = 0
    for row in made("chat"):
        if "tools" not in row:
            continue
        request, call, *rest = row["messages"]
        [city] = re.findall(r"in (\w+)\?", request["content"])
        function = call["tool_calls"][0]["function"]
        assert function["name"] == ("time" if "time" in request["content"] else "weather")
        assert json.loads(function["arguments"]) == {"city": city}
        if rest:
            result, answer = rest
            assert answer["content"] == f"It is {result['content']} in {city}."
        calls, uses = calls + (not rest), uses + bool(rest)
    assert calls > 10 and uses > 10


def test_completions() -> None:
    for row in made("completions"):
        assert row.keys() == {"prompt", "completion", "task"}
        [prompt] = re.findall(r"^Question: (.*)\nAnswer:$", row["prompt"])
        assert row["completion"] == f" {solved(prompt)}"


# Held-out subjects


def words(found: list[dict[str, Any]], pattern: str) -> set[str]:
    return {prompt for row in found for turn in turns(row) for prompt in re.findall(pattern, " | ".join(turn))}


@pytest.mark.parametrize(
    "pattern", [r"\| (\w(?:-\w)+)$", r"(?:Repeat the word|Say) (\w+)\. ", r"(\d+ or \d+)\?", r"plural of (\w+)", r"(\w+) ="]
)
def test_training_never_shows_held_out_subjects(pattern: str) -> None:
    """In any turn of any conversation. Answers are compared for spelling, since some requests name the word in a turn before."""
    training = words(made("chat", 3000) + made("chat", 500, seed=1), pattern)
    last = [{**row, "messages": row["messages"][-2:]} for row in made("chat", 1000, held_out=True)]
    held_out = words(last, pattern)
    assert len(training) > 100 and len(held_out) > 5 and not training & held_out


def test_held_out_completions() -> None:
    training = {row["prompt"] for row in made("completions", 3000)}
    held_out = made("completions", 300, held_out=True)
    assert not training & {row["prompt"] for row in held_out}
    assert "thanks" not in {row["task"] for row in held_out}


# Preferences


def test_rejected_answers() -> None:
    flaws = Counter()
    for row in made("preferences"):
        [chosen], [rejected] = row["chosen"], row["rejected"]
        flaws[row["flaw"]] += 1
        assert rejected["role"] == "assistant" and rejected != chosen
        if row["flaw"] == "verbose":
            assert chosen["content"] in rejected["content"] and len(rejected["content"]) > len(chosen["content"]) + 30
        elif row["flaw"] == "unterminated":
            assert rejected["content"].startswith(chosen["content"]) and len(rejected["content"]) >= len(chosen["content"]) + 10
            assert len(rejected["content"]) <= 100
        else:
            assert row["flaw"] == "wrong"
    assert flaws.keys() == set(get_args(Flaw)) and min(flaws.values()) > COUNT / 5


def text(message: dict[str, Any]) -> str:
    if "tool_calls" not in message:
        return str(message["content"])
    function = message["tool_calls"][0]["function"]
    return json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})


@pytest.mark.parametrize("held_out", [False, True])
def test_check_accepts_chosen_and_refuses_rejected_answers(held_out: bool) -> None:
    for row in made("preferences", held_out=held_out):
        assert check(row, text(row["chosen"][0]))
        assert not check(row, text(row["rejected"][0])), row


# The check


def test_check_of_each_kind() -> None:
    chat = {"messages": [{"role": "user", "content": "Say a."}, {"role": "assistant", "content": "a"}]}
    for row in (chat, {"prompt": [], "chosen": [{"role": "assistant", "content": "a"}]}, {"prompt": "", "completion": " a"}):
        assert check(row, "a") and check(row, " a\n")
        for wrong in ("", "A", "a.", "b", "a a", "a\nb"):
            assert not check(row, wrong)


CALL = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": '{"city": "Oslo"}'}}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ('{"name": "time", "arguments": {"city": "Oslo"}}', True),
        ('{"arguments":{"city":"Oslo"},"name":"time"}', True),
        ('{"name": "time", "arguments": "{\\"city\\": \\"Oslo\\"}"}', True),
        ('<tool_call>\n{"name": "time", "arguments": {"city": "Oslo"}}\n</tool_call>', True),
        ('{"name": "time", "arguments": {"city": "Rome"}}', False),
        ('{"name": "weather", "arguments": {"city": "Oslo"}}', False),
        ('{"name": "time", "arguments": {"city": "Oslo", "unit": "h"}}', False),
        ('{"name": "time", "arguments": {}}', False),
        ('{"name": "time"}', False),
        ('{"name": "time", "arguments": "Oslo"}', False),
        ('{"name": "time", "arguments": {"city": "Oslo"}', False),
        ("It is 5 o'clock in Oslo.", False),
        ("", False),
        ("null", False),
        ("[]", False),
        ("5", False),
        ('"name"', False),
    ],
)
def test_check_of_tool_calls(answer: str, right: bool) -> None:
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    assert check(row, answer) == right


# Size


def test_rows_fit_in_the_context_of_the_laptop_recipe() -> None:
    """With a tokenizer of 512 tokens that has seen source code. JSON of the tools and of the calls is counted in full."""
    library = Path(os.__file__).parent
    sources = (library / f"{name}.py" for name in ("argparse", "ast", "calendar", "codecs", "csv", "difflib", "enum", "typing"))
    tokenizer = bpe.train([source.read_text() for source in sources], 512)
    for row in made("preferences", 1000):
        tools = json.dumps(row["tools"][0]["function"]) if "tools" in row else ""
        for answer in (row["chosen"], row["rejected"]):
            lines = [f"{message['role']}: {text(message)}\n" for message in row["prompt"] + answer]
            assert len(tokenizer.encode(tools + "".join(lines)).ids) < 256 - 20
    for row in made("completions", 1000):
        assert len(tokenizer.encode(row["prompt"] + row["completion"]).ids) < 100
