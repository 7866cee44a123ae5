"""OpenAI's responses API: parameters without an effect, inputs that the model cannot read, and the numbers of its events.

Nothing is stored. An endpoint has several replicas and gateways, and a conversation in the memory of one of them would be lost
with it; a client sends the whole conversation instead.
"""

import json
from typing import Any

from strata.serving.api import failover
from strata.serving.api.requests import MAX_DEPTH, ApiError, dicts, nesting, refuse_structural_tag

STORED = "nothing is stored, so send the whole conversation as 'input'"
OWN_TOOLS = "the model has no tools of its own"
UNSUPPORTED = {
    "background": "nothing is stored, so an answer must be read while it is generated",
    "conversation": STORED,
    "previous_response_id": STORED,
    "previous_input_messages": STORED,
    "prompt": "no prompt templates are stored",
    "max_tool_calls": OWN_TOOLS,
    "moderation": "no moderation model is served",
    "context_management": "the conversation is used as it was sent",
}
# Reasoning is returned as plain text, so nothing has to be encrypted to be sent back.
INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
ROLES = ("system", "developer", "user", "assistant")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
CHOICES = ("none", "auto", "required")
# pydantic compares an item with every kind that OpenAI has, and builds an error for each: 4,000 wrong ones need 9 s.
MAX_ITEMS = 1024
MAX_TOOLS = 128


def check(tree: dict[str, Any]) -> None:
    """Raises a 400 for what would be ignored, would fail, or would need long to be refused. Reduces contents to their text."""
    refuse_structural_tag(tree)
    for name, reason in UNSUPPORTED.items():
        if tree.get(name):
            raise ApiError(400, f"'{name}' is not supported: {reason}.", param=name)
    for name in tree["include"] if isinstance(tree.get("include"), list) else ():
        if name not in INCLUDED:
            raise ApiError(400, f"'include' may have {' and '.join(INCLUDED)}, not {str(name)[:50]!r}.", param="include")
    for name, most in (("input", MAX_ITEMS), ("tools", MAX_TOOLS)):
        entries = tree.get(name)
        if isinstance(entries, list) and (len(entries) > most or len(dicts(entries)) != len(entries)):
            raise ApiError(400, f"'{name}' may have at most {most} entries, all of them objects.", param=name)
    for tool in dicts(tree.get("tools")):
        if tool.get("type") != "function":
            raise ApiError(400, f"A tool of type {str(tool.get('type'))[:50]!r} is not supported: {OWN_TOOLS}.", param="tools")
    choice = tree.get("tool_choice")
    if choice is not None and choice not in CHOICES and not (isinstance(choice, dict) and choice.get("type") == "function"):
        raise ApiError(400, f"'tool_choice' may be {', '.join(CHOICES)} or a function.", param="tool_choice")
    text = tree.get("text")
    if isinstance(text, dict) and text.get("verbosity") not in (None, "medium"):
        raise ApiError(400, "'text.verbosity' is not supported: the model has no such setting.", param="text")
    for item in dicts(tree.get("input")):
        _check_item(item)


def _check_item(item: dict[str, Any]) -> None:
    kind = item.get("type") or "message"
    if kind not in ITEMS:
        reason = STORED if kind == "item_reference" else f"an item of 'input' may be {', '.join(ITEMS)}"
        raise ApiError(400, f"An item of type {str(kind)[:50]!r} is not supported: {reason}.", param="input")
    if kind == "message" and (role := item.get("role")) not in ROLES:
        raise ApiError(400, f"'role' must be one of {', '.join(ROLES)}, not {str(role)[:50]!r}.", param="input")
    if kind == "reasoning" and item.get("encrypted_content"):
        raise ApiError(400, "'encrypted_content' cannot be read: send the reasoning's 'content'.", param="input")
    for name in ("content", "output", "summary"):
        if isinstance(item.get(name), list):
            item[name] = [_text_part(part) for part in item[name]]
    arguments = item.get("arguments")
    if isinstance(arguments, str) and nesting(arguments) > MAX_DEPTH:
        raise ApiError(400, f"The arguments of a tool call are nested deeper than {MAX_DEPTH} levels.", param="input")
    content = item.get("content")
    if item.get("role") == "assistant" and isinstance(content, list) and len(content) != 1:  # vLLM would use the first alone
        item["content"] = "".join(part.get("text", part.get("refusal")) for part in content)


def _text_part(part: Any) -> dict[str, str]:
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise ApiError(400, f"The model accepts only text: content of type {str(kind)[:50]!r} is not supported.", param="input")
    name = "refusal" if kind == "refusal" else "text"
    if not isinstance(part.get(name), str):
        raise ApiError(400, f"A part of type '{kind}' must have a '{name}'.", param="input")
    return {"type": kind, name: part[name]}


def obstacle(tree: dict[str, Any]) -> str | None:
    """As `failover.obstacle`."""
    wanted = (tree.get("text") or {}).get("format") or {}
    return "guided decoding" if wanted.get("type", "text") != "text" else failover.obstacle(tree)


def next_number(events: bytes) -> int:
    """Sequence number that follows the last of these events."""
    data = events.rstrip().rpartition(b"data: ")[2]
    return int(json.loads(data)["sequence_number"]) + 1


def number(event: dict[str, Any], sequence: int, request: str, created: int) -> str:
    """Serializes an event with its sequence number, and with ids that depend only on the request and the position of the item,
    so that a replica that continues the stream writes the same ones. vLLM draws them at random, and others for the last event
    than for those before it."""
    event["sequence_number"] = sequence
    index = event.get("output_index")
    if "item_id" in event:
        event["item_id"] = f"item_{request}_{index}"
    if isinstance(event.get("item"), dict):
        _name(event["item"], request, index)
    if isinstance(response := event.get("response"), dict):
        finish(response, request, created)
        if event["type"] == "response.completed" and response["status"] == "incomplete":
            event["type"] = "response.incomplete"
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def finish(response: dict[str, Any], request: str, created: int) -> None:
    """Sets ids and the time of a whole response."""
    response["created_at"] = created
    for index, item in enumerate(response["output"]):
        _name(item, request, index)


def _name(item: dict[str, Any], request: str, index: Any) -> None:
    if item.get("id"):
        item["id"] = f"item_{request}_{index}"
    call = item.get("call_id")
    # Some parsers take the id from the model's text, and its template expects that one.
    if isinstance(call, str) and call.startswith(("call_", "chatcmpl-tool-")):
        item["call_id"] = f"call_{request}_{index}"
