"""Translates vLLM's errors into the endpoint's format, with recipe keys in place of vLLM's flags."""

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
QUOTED = re.compile(r" \((?:parameter|value)=.*\)$", re.DOTALL)  # repeats 'param' and the client's own value
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")


def refusal(error: Any) -> ApiError:
    """Converts vLLM's ErrorInfo."""
    return ApiError(error.code, translate(error.message), param=error.param)


def parse_error_event(event: str) -> ApiError | None:
    """Error in an event of a stream, or None."""
    if not event.startswith('data: {"error"'):
        return None
    error = json.loads(event.removeprefix("data: "))["error"]
    return ApiError(error["code"], translate(error["message"]), param=error["param"])


def translate(message: str) -> str:
    message = QUOTED.sub("", message)
    for flag, key in KEYS.items():
        message = message.replace(flag, key)
    # Any other engine flag of vLLM can be set under serve.engine by its name.
    return FLAG.sub(lambda flag: f"serve.engine.{flag[1].replace('-', '_')}", message)
