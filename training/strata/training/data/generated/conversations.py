"""Conversations in OpenAI's format, composed of tasks: with and without a system prompt, of several turns, and with tools."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from strata.training.data.generated.tasks import TASKS, Task, capitals_word, spell_word
from strata.training.data.generated.words import cities

Message = dict[str, Any]

SYSTEM = (None, None, "You are a helpful assistant.", "Answer briefly.")
LOUD = "Answer in capitals."  # a system prompt that changes answers
LOUD_TASKS = ("repeat", "pick", "reverse")
CALL_ID = "call_1"


@dataclass(frozen=True)
class Conversation:
    """Messages up to the last request, and its task. `answer` is the last message, which completes the conversation."""

    prompt: tuple[Message, ...]
    answer: Message
    wrong: Message
    task: Task
    tools: tuple[Message, ...] = ()


def conversation(random: Random, held_out: bool) -> Conversation:
    """Conversation with a random form. The last request is held out or not, the others are not."""
    form = random.choices((_single, _several, _follow_up, _loud, _tool), (60, 20, 8, 5, 7))[0]
    while True:
        made = form(random)
        if made is not None and made.task.held_out == held_out:
            return made


def draw(random: Random, name: str | None = None, held_out: bool = False) -> Task:
    """Task of this name or of any name, with a subject that is held out or not."""
    while True:
        task = TASKS[name or random.choice(tuple(TASKS))](random)
        if task.held_out == held_out:
            return task


def _single(random: Random) -> Conversation:
    return _ask(_system(random), TASKS[random.choice(tuple(TASKS))](random))


def _several(random: Random) -> Conversation:
    """Two or three tasks, one after the other."""
    messages = _system(random)
    for _ in range(random.randint(1, 2)):
        messages = _continued(messages, draw(random))
    return _ask(messages, TASKS[random.choice(tuple(TASKS))](random))


def _follow_up(random: Random) -> Conversation:
    """Request that refers to the word of an earlier turn."""
    first = draw(random, "repeat")
    messages = _continued(_system(random), first)
    word = first.answer
    if random.random() < 0.5:
        task = spell_word(random, word, random.choice(("Spell it.", "Now spell it.")))
    else:
        task = capitals_word(word, random.choice(("In capitals.", "Now in capitals.")))
    return _ask(messages, task)


def _loud(random: Random) -> Conversation:
    """System prompt that asks for capital letters. The same answer in small letters is wrong."""
    task = TASKS[random.choice(LOUD_TASKS)](random)
    loud = Task(task.name, task.subject, task.prompt, task.answer.upper(), task.answer)
    return _ask(({"role": "system", "content": LOUD},), loud)


def _tool(random: Random) -> Conversation:
    """Call of a tool, or the answer to its result. An answer that the model invents instead of a call is wrong."""
    city, other = cities(random, 2)
    name, unit = random.choice((("weather", "degrees"), ("time", "o'clock")))
    value, wrong = random.sample(range(1, 13) if name == "time" else range(-9, 40), 2)
    prompt = {"weather": f"What is the weather in {city}?", "time": f"What time is it in {city}?"}[name]
    tools = (_definition(name),)
    asked = (_message("user", prompt),)
    call = _call(name, city)
    if random.random() < 0.5:
        task = Task(f"call_{name}", city, prompt, _written(name, city), _written(name, other))
        invented = _message("assistant", f"It is {value} {unit} in {city}.")
        return Conversation(asked, call, random.choice((invented, _call(name, other))), task, tools)
    result = {"role": "tool", "tool_call_id": CALL_ID, "content": f"{value} {unit}"}
    right, not_right = (f"It is {number} {unit} in {city}." for number in (value, wrong))
    task = Task(f"use_{name}", f"{city} {value}", prompt, right, not_right)
    return Conversation((*asked, call, result), _message("assistant", right), _message("assistant", not_right), task, tools)


def _definition(name: str) -> Message:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "parameters": city}}


def _call(name: str, city: str) -> Message:
    function = {"name": name, "arguments": json.dumps({"city": city})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}]}


def _written(name: str, city: str) -> str:
    return json.dumps({"name": name, "arguments": {"city": city}})


def _system(random: Random) -> tuple[Message, ...]:
    text = random.choice(SYSTEM)
    return () if text is None else (_message("system", text),)


def _continued(messages: tuple[Message, ...], task: Task) -> tuple[Message, ...]:
    return (*messages, _message("user", task.prompt), _message("assistant", task.answer))


def _ask(messages: tuple[Message, ...], task: Task) -> Conversation:
    asked = (*messages, _message("user", task.prompt))
    return Conversation(asked, _message("assistant", task.answer), _message("assistant", task.wrong), task)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
