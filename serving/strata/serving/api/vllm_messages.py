"""Turns vLLM's errors into this endpoint's: one shape, one set of types, and the recipe's keys in place of vLLM's flags."""

import json
import re
from typing import Any

from strata.serving.api.requests import ApiError

# Longer ones first.
KEYS = {
    "--enable-auto-tool-choice and --tool-call-parser": "serve.tool_parser",
    "--reasoning-parser and/or --reasoning-config": "serve.reasoning_parser",
    "--tool-call-parser": "serve.tool_parser",
    "--reasoning-parser": "serve.reasoning_parser",
}
QUOTED = re.compile(r" \((?:parameter|value)=.*\)$", re.DOTALL)  # what 'param' says, and the client knows
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")


def refusal(error: Any) -> ApiError:
    """`error` is vLLM's ErrorInfo."""
    return ApiError(error.code, in_our_words(error.message), param=error.param)


def error_in(event: str) -> ApiError | None:
    """The error that vLLM made an event of, if this is one."""
    if not event.startswith('data: {"error"'):
        return None
    error = json.loads(event.removeprefix("data: "))["error"]
    return ApiError(error["code"], in_our_words(error["message"]), param=error["param"])


def in_our_words(message: str) -> str:
    message = QUOTED.sub("", message)
    for flag, key in KEYS.items():
        message = message.replace(flag, key)
    # Any other flag of vLLM's engine can be set under serve.engine, by its name.
    return FLAG.sub(lambda flag: f"serve.engine.{flag[1].replace('-', '_')}", message)
