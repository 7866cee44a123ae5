"""Errors and last events of each API, by the name of the replicas' call."""

import json

from strata.serving.api.requests import ApiError

ANTHROPIC = frozenset({"messages", "count_tokens"})
# Event streams with named events, which end with an event of their own instead of [DONE].
NAMED = frozenset({"messages", "responses"})

# Error types of Anthropic's API by status. Other statuses are the client's fault below 500 and the server's above.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def body(method: str | None, error: ApiError) -> bytes:
    """JSON of an answer that is an error."""
    if method not in ANTHROPIC:
        return json.dumps(error.body).encode()
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return json.dumps({"type": "error", "error": {"type": kind, "message": str(error)}}).encode()


def event(method: str, body: bytes) -> bytes:
    """Event of a stream that ends with an error, of which `body` is the JSON."""
    return (b"event: error\n" if method in NAMED else b"") + b"data: " + body + b"\n\n"


def last_event(method: str) -> bytes:
    """End of a stream whose replica was lost after the last token."""
    return b"" if method in NAMED else b"data: [DONE]\n\n"
