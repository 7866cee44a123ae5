"""HTTP headers of the endpoint."""

import math
import uuid

from strata.serving.api.requests import ApiError

PREFILL = "x-strata-prefill"  # where the prompt was prefilled; the prefill engine, or the reason for a local prefill
REPLICA = "x-strata-replica"  # replica that answered, prefix tokens that it was known to have cached, reason of the choice
WAITED = "x-strata-waited"  # seconds that the request waited because no engine was up
REQUEST_ID = "x-request-id"  # the client's or a generated id; in every response
MAX_REQUEST_ID = 512
EXPLAIN = "x-strata-explain"  # 1: the answer ends with what the platform did for it
SPECULATION = "x-strata-speculation"  # off: no drafts for this request, on: as the endpoint decides
DEADLINE = "x-request-deadline"  # seconds from the arrival of the request to the end of its answer
OLD_DEADLINE = "x-strata-deadline"  # its former name


def request_id(headers: list[tuple[bytes, bytes]]) -> tuple[str, bool]:
    """Request id for the response, and whether the client's id is invalid: it must be printable ASCII of bounded length.
    Engines never see it, so a client cannot use the id of another client's request."""
    sent = next((value for name, value in headers if name == REQUEST_ID.encode()), b"")
    usable = len(sent) <= MAX_REQUEST_ID and all(0x20 <= letter < 0x7F for letter in sent)
    return (sent.decode() if sent and usable else uuid.uuid4().hex), not usable


def explained(headers: list[tuple[bytes, bytes]]) -> bool:
    """True if the client asks for the explanation of its answer."""
    return (EXPLAIN.encode(), b"1") in headers


def speculates(headers: list[tuple[bytes, bytes]]) -> bool:
    """False if the client wants no drafts for its request. Raises a 400."""
    sent = next((value for name, value in headers if name == SPECULATION.encode()), b"on")
    if sent not in (b"on", b"off"):
        raise ApiError(400, f"'{SPECULATION}' must be on or off.", param=SPECULATION)
    return sent == b"on"


def deadline(headers: list[tuple[bytes, bytes]]) -> float | None:
    """Seconds in which the client wants the whole answer, None without a limit. Raises a 400."""
    names = (DEADLINE.encode(), OLD_DEADLINE.encode())
    sent = next((value for name, value in headers if name in names), None)
    if sent is None:
        return None
    try:
        seconds = float(sent)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(400, f"'{DEADLINE}' must be a positive number of seconds.", param=DEADLINE)
    return seconds


def authorized(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers with the key in `Authorization`. Anthropic's clients send it as `x-api-key`."""
    names = {name for name, _ in headers}
    if b"x-api-key" not in names or b"authorization" in names:
        return headers
    key = next(value for name, value in headers if name == b"x-api-key")
    return [*headers, (b"authorization", b"Bearer " + key)]
