"""Anthropic's messages API: parameters without an effect, contents that the model cannot read, and streams that can continue."""

import difflib
from typing import Any

from pydantic import BaseModel

from strata.serving.api.requests import NOTES, ApiError, dicts

UNSUPPORTED = {
    "thinking": "a model with serve.reasoning_parser thinks as its template says; see 'chat_template_kwargs'",
    "container": "the model has no tools of its own",
    "mcp_servers": "the model has no tools of its own",
    "context_management": "the conversation is used as it was sent",
    "inference_geo": "the endpoint is in one place",
}
NO_EFFECT = {"thinking": {"type": "disabled"}}
NAMED_ELSEWHERE = NOTES | UNSUPPORTED.keys() | {"service_tier", "cache_control"}
ROLES = ("user", "assistant", "system")
BLOCKS = ("text", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking")
RESULTS = ("text", "tool_reference")


def check(tree: dict[str, Any], model: type[BaseModel]) -> None:
    """Raises a 400 for what would be ignored or fail. vLLM's `model` of the request ignores unknown parameters."""
    for name, reason in UNSUPPORTED.items():
        if tree.get(name) and tree[name] != NO_EFFECT.get(name):
            raise ApiError(400, f"'{name}' is not supported: {reason}.", param=name)
    for name in sorted(tree.keys() - model.model_fields.keys() - NAMED_ELSEWHERE):
        if tree[name] is not None:
            alike = difflib.get_close_matches(name[:50], model.model_fields, 1)
            hint = f" Did you mean '{alike[0]}'?" if alike else ""
            raise ApiError(400, f"There is no parameter '{name[:50]}'.{hint}", param=name)
    _check_blocks(tree.get("system"), ("text",), "system")
    for message in dicts(tree.get("messages")):
        if (role := message.get("role")) not in ROLES:
            raise ApiError(400, f"'role' must be one of {', '.join(ROLES)}, not {str(role)[:50]!r}.", param="messages")
        _check_blocks(message.get("content"), BLOCKS, "messages")
        for block in dicts(message.get("content")):
            _check_blocks(block.get("content"), RESULTS, "messages")


def _check_blocks(content: Any, allowed: tuple[str, ...], param: str) -> None:
    for block in dicts(content):
        if (kind := block.get("type")) not in allowed:
            raise ApiError(400, f"The model accepts only text: content of type {str(kind)[:50]!r} is not supported.", param=param)


def obstacle(tree: dict[str, Any]) -> str | None:
    """As `failover.obstacle`."""
    choice = (tree.get("tool_choice") or {}).get("type", "auto")
    if (tree.get("output_config") or {}).get("format") or (tree.get("tools") and choice not in ("auto", "none")):
        return "guided decoding"
    return None
