"""Examples of fine-tuning data: rows of JSONL, Parquet files or datasets, parsed and validated by kind.

Rows are in the formats of OpenAI and TRL. Messages become the form in which serving passes them to a chat template: arguments of
tool calls as objects, text parts joined, keys that are null left out. An error names the file, the line and the example.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Never

from strata.platform.errors import UserError, shown
from strata.platform.recipe import DataKind
from strata.training.data.readers import Row, json_kind

EXCERPT = 120  # characters of an example that an error repeats
REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which transformers finds an assistant's reasoning

Message = dict[str, Any]
Fail = Callable[[str, str], Never]


@dataclass(frozen=True)
class Place:
    """Position of an example in its source."""

    source: str
    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.unit} {self.number:,} of {self.source}"


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Completion:
    prompt: str
    answer: str


@dataclass(frozen=True)
class Chat:
    """Conversation. `counted` are the messages, by index, whose tokens the loss covers: turns of the assistant."""

    messages: tuple[Message, ...]
    counted: tuple[int, ...]
    tools: tuple[Row, ...] | None = None


@dataclass(frozen=True)
class Example:
    """Row of a set: one sequence, or the chosen and the rejected one. `label` is that of an answer which is good or bad by
    itself."""

    place: Place
    excerpt: str
    sequences: tuple[Text | Completion | Chat, ...]
    label: bool | None = None

    def content_hash(self) -> int:
        """Hash of the content in [0, 2^64). Copies of an example have the same one, whatever their place and tokenizer."""
        content = [[asdict(each) for each in self.sequences], self.label]
        data = json.dumps(content, sort_keys=True, default=str).encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")

    def refusal(self, problem: str, fix: str) -> UserError:
        return _refusal(self.place, problem, self.excerpt, fix)


def _refusal(place: Place, problem: str, excerpt: str, fix: str) -> UserError:
    where = str(place)
    return UserError(f"{where[0].upper()}{where[1:]} {problem}. The example: {excerpt}", fix)


def text_example(text: str, place: Place) -> Example:
    return Example(place, shown(text, EXCERPT), (Text(text),))


def parse(row: Row, kind: DataKind, place: Place) -> Example:
    """Example of a row of chat, completion or preference data."""
    excerpt = shown(json.dumps(row, ensure_ascii=False, default=str), EXCERPT)

    def fail(problem: str, fix: str) -> Never:
        raise _refusal(place, problem, excerpt, fix)

    label = None
    sequences: tuple[Completion | Chat, ...]
    if kind == "chat":
        sequences = (_chat(row, fail),)
    elif kind == "completion":
        sequences = (_completion(row, fail),)
    elif "label" in row and not ("chosen" in row or "rejected" in row):
        if not isinstance(row["label"], bool):
            fail(f"has a label that is {json_kind(row['label'])}", "Write true for a good answer, false for a bad one.")
        answer = _last_answer(row, fail) if "messages" in row else _completion(row, fail)
        sequences, label = (answer,), row["label"]
    else:
        sequences = _pair(row, fail)
    return Example(place, excerpt, sequences, label)


def _chat(row: Row, fail: Fail) -> Chat:
    messages = _messages(_required(row, "messages", fail), "messages", fail)
    return _conversation((), messages, row, fail)


def _last_answer(row: Row, fail: Fail) -> Chat:
    """Conversation in which only the assistant's last turn counts."""
    messages = _messages(_required(row, "messages", fail), "messages", fail)
    last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
    return _conversation(messages[:last], messages[last:], row, fail)


def _completion(row: Row, fail: Fail) -> Completion | Chat:
    prompt, answer = _required(row, "prompt", fail), _required(row, "completion", fail)
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer.strip():
            fail("has a blank completion", "Write the answer, or remove the row.")
        return Completion(prompt, answer)
    _require_lists({"prompt": prompt, "completion": answer}, fail)
    return _conversation(_messages(prompt, "prompt", fail), _messages(answer, "completion", fail), row, fail)


def _pair(row: Row, fail: Fail) -> tuple[Completion | Chat, Completion | Chat]:
    chosen, rejected, prompt = _required(row, "chosen", fail), _required(row, "rejected", fail), row.get("prompt")
    if chosen == rejected:
        fail("has the same chosen and rejected answer", "Remove the row: there is nothing to learn from it.")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if not isinstance(prompt, str):
            fail("has answers that are strings, but no prompt that is a string", "Add the key 'prompt'.")
        if not chosen.strip():
            fail("has a blank chosen answer", "Write the answer, or remove the row.")
        return Completion(prompt, chosen), Completion(prompt, rejected)
    _require_lists({"chosen": chosen, "rejected": rejected}, fail)
    one, other = _messages(chosen, "chosen", fail), _messages(rejected, "rejected", fail)
    if isinstance(prompt, list):
        given = _messages(prompt, "prompt", fail)
        size = len(given)
        if one[:size] == given == other[:size]:  # the conversations repeat their prompt
            one, other = one[size:], other[size:]
    else:  # none, or the user's message once more as a string
        same = (a == b for a, b in zip(one, other, strict=False))
        size = next((index for index, equal in enumerate(same) if not equal), min(len(one), len(other)))
        given, one, other = one[:size], one[size:], other[size:]
        if not given:
            fail("has conversations without a common beginning", "Begin both with the prompt's messages.")
    for name, answer in (("chosen", one), ("rejected", other)):
        if not answer or answer[0]["role"] != "assistant":
            problem = f"begins with the role '{answer[0]['role']}'" if answer else "is empty"
            fail(
                f"has a {name} answer that {problem} after the common prompt", "Let both answer the same prompt as the assistant."
            )
    return _conversation(given, one, row, fail), _conversation(given, other, row, fail)


def _required(row: Row, key: str, fail: Fail) -> Any:
    if row.get(key) is None:
        has = ", ".join(row) or "none"
        other = _kind_of(row)
        fix = f"Set the kind to {other}, or fix the row." if other else f"Add the key '{key}'."
        fail(f"has no '{key}' (it has: {has})", fix)
    return row[key]


def _kind_of(row: Row) -> DataKind | None:
    """Kind of data that a row looks like."""
    forms: dict[DataKind, tuple[set[str], ...]] = {
        "preference": ({"chosen", "rejected"}, {"prompt", "completion", "label"}, {"messages", "label"}),
        "chat": ({"messages"},),
        "completion": ({"prompt", "completion"},),
        "text": ({"text"},),
    }
    return next((kind for kind, keys in forms.items() if any(each <= row.keys() for each in keys)), None)


def _require_lists(values: dict[str, Any], fail: Fail) -> None:
    if not all(isinstance(value, list) for value in values.values()):
        kinds = " and ".join(f"a {key} that is {json_kind(value)}" for key, value in values.items())
        fail(f"has {kinds}", "Write both as strings, or both as lists of messages.")


def _conversation(given: tuple[Message, ...], answer: tuple[Message, ...], row: Row, fail: Fail) -> Chat:
    """Conversation in which the assistant's turns of `answer` count, but for those with `weight` 0."""
    messages = (*given, *answer)
    for message in messages:
        if message.get("weight", 1) not in (0, 1):
            fail(
                f"has a message with weight {shown(message['weight'])}",
                "Write 1 for a turn that counts, 0 for one that does not.",
            )
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index >= len(given)]
    if not turns:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        fail(f"has no turn of the assistant (roles: {roles})", "Use the role 'assistant' for the answers, or remove the row.")
    counted = tuple(index for index in turns if messages[index].get("weight", 1))
    if not counted:
        fail("has weight 0 on every turn of the assistant", "Remove the row: none of its tokens counts.")
    plain = tuple({key: value for key, value in message.items() if key != "weight"} for message in messages)
    return Chat(plain, counted, _tools(row.get("tools"), fail))


def _tools(tools: Any, fail: Fail) -> tuple[Row, ...] | None:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        fail("has tools that are not a list of objects", 'Write them as [{"type": "function", "function": {...}}].')
    return tuple(tools)


def _messages(value: Any, key: str, fail: Fail) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        problem = "an empty list" if value == [] else json_kind(value)
        fail(f"has '{key}' that is {problem}, not messages", 'Write messages as [{"role": "user", "content": "..."}].')
    return tuple(_message(message, f"message {number} of '{key}'", fail) for number, message in enumerate(value, 1))


def _message(value: Any, name: str, fail: Fail) -> Message:
    if not isinstance(value, dict):
        fail(f"has {name} that is {json_kind(value)}", 'Write messages as {"role": "user", "content": "..."}.')
    message = {key: each for key, each in value.items() if each is not None}
    if not isinstance(message.get("role"), str) or not message["role"]:
        fail(f"has {name} without a role", "Add the key 'role', such as user or assistant.")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], name, fail)
    if "content" not in message and (message.get("tool_calls") or any(key in message for key in REASONING)):
        message["content"] = ""
    message["content"] = _content(message.get("content"), name, fail)
    return message


def _content(content: Any, name: str, fail: Fail) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fail(f"has {name} with content that is {json_kind(content)}", "Write the content as a string.")
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(content):
        fail(f"has {name} with content other than text", "Only text can be trained on: remove the part, or the row.")
    return "\n".join(texts)


def _tool_calls(calls: Any, name: str, fail: Fail) -> list[Row]:
    """Tool calls with arguments as an object. OpenAI's format has them as a string of JSON; templates expect the object."""
    if not isinstance(calls, list):
        fail(f"has {name} with tool_calls that are {json_kind(calls)}", "Write tool_calls as a list.")
    found: list[Row] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            fail(f"has {name} with a tool call without a function's name", 'Write it as {"function": {"name": "..."}}.')
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict):
            fail(f"has {name} with arguments of '{function['name']}' that are not a JSON object", "Fix the arguments.")
        function = {**function, "arguments": arguments}
        found.append({**call, "function": function} if "function" in call else function)
    return found
