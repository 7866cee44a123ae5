"""Rows of the generated data sets, as they are written to JSONL, and the check of an answer.

| kind | keys of a row |
|---|---|
| chat | `messages` in OpenAI's format, the last one is the right answer; `tools` if there are any |
| preferences | `prompt`, `chosen` and `rejected`, lists of messages; `tools` if there are any; `flaw` of the rejected answer |
| completions | `prompt` and `completion`, texts |

Every row has the name of its `task`. Row n of a seed has the same prompt in chat and in preferences, and does not depend on the
number of rows.
"""

import json
from collections.abc import Iterator
from random import Random
from typing import Any, Literal, get_args

from strata.training.data.generated.conversations import Conversation, conversation, draw
from strata.training.data.generated.tasks import Task

Kind = Literal["chat", "preferences", "completions"]
Flaw = Literal["wrong", "verbose", "unterminated"]
Row = dict[str, Any]

UNTERMINATED_CHARACTERS = 60  # a rejected answer that goes on is cut here, within a word
VERBOSE = (
    "Sure, I can help you with that. Here is my answer: {}",
    "That is a good question. Let me think about it. My answer is: {}",
    "{} (Please tell me if you need more help with this.)",
)


def rows(kind: Kind, count: int, seed: int, held_out: bool = False) -> Iterator[Row]:
    """Rows of a data set. Those of `held_out` request answers on subjects that no row of training has."""
    make = {"chat": _chat, "preferences": _preference, "completions": _completion}[kind]
    for index in range(count):
        yield make(Random(f"{seed} {held_out} {index}"), held_out)


def check(row: Row, answer: str) -> bool:
    """True if an answer to the last request of a row is right: equal to the row's own, apart from blanks around it.

    A tool call is compared as JSON, with or without the tags <tool_call>.
    """
    if "completion" in row:
        return bool(answer.strip() == row["completion"].strip())
    [right] = row["chosen"] if "chosen" in row else row["messages"][-1:]
    if "tool_calls" not in right:
        return bool(answer.strip() == right["content"])
    function = right["tool_calls"][0]["function"]
    return _call(answer) == {"name": function["name"], "arguments": json.loads(function["arguments"])}


def _call(answer: str) -> Row | None:
    text = answer.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
    try:
        found = json.loads(text)
        arguments = json.loads(found["arguments"]) if isinstance(found["arguments"], str) else found["arguments"]
        return {"name": found["name"], "arguments": arguments}
    except (ValueError, TypeError, KeyError):
        return None


def _chat(random: Random, held_out: bool) -> Row:
    made = conversation(random, held_out)
    return {"messages": [*made.prompt, made.answer], **_others(made)}


def _preference(random: Random, held_out: bool) -> Row:
    made = conversation(random, held_out)
    flaw, rejected = _rejected(random, made)
    return {"prompt": list(made.prompt), "chosen": [made.answer], "rejected": [rejected], "flaw": flaw, **_others(made)}


def _completion(random: Random, held_out: bool) -> Row:
    task = draw(random, held_out=held_out)
    return {"prompt": f"Question: {task.prompt}\nAnswer:", "completion": f" {task.answer}", "task": task.name}


def _others(made: Conversation) -> Row:
    return {**({"tools": list(made.tools)} if made.tools else {}), "task": made.task.name}


def _rejected(random: Random, made: Conversation) -> tuple[Flaw, Row]:
    """Rejected answer and its flaw. A tool call has no verbose form: it is right or wrong."""
    flaw: Flaw = random.choice(get_args(Flaw))
    if flaw == "wrong" or "tool_calls" in made.answer:
        return "wrong", made.wrong
    text = random.choice(VERBOSE).format(made.task.answer) if flaw == "verbose" else _unterminated(random, made.task)
    return flaw, {"role": "assistant", "content": text}


def _unterminated(random: Random, task: Task) -> str:
    """Right answer that does not end: repeated, or followed by turns that the model invents, until a limit cuts it."""
    if random.random() < 0.5:
        text = " ".join([task.answer] * UNTERMINATED_CHARACTERS)
    else:
        turns = [task.answer]
        for _ in range(UNTERMINATED_CHARACTERS):
            invented = draw(random)
            turns += [f"user: {invented.prompt}", f"assistant: {invented.answer}"]
        text = "\n".join(turns)
    return text[: max(UNTERMINATED_CHARACTERS, len(task.answer) + 10)]
