"""HTTP headers of the endpoint."""

import uuid

PREFILL = "x-strata-prefill"  # where the prompt was prefilled; the prefill engine, or the reason for a local prefill
WAITED = "x-strata-waited"  # seconds that the request waited because no engine was up
REQUEST_ID = "x-request-id"  # the client's or a generated id; in every response
MAX_REQUEST_ID = 512


def request_id(headers: list[tuple[bytes, bytes]]) -> tuple[str, bool]:
    """Request id for the response, and whether the client's id is invalid: it must be printable ASCII of bounded length.
    Engines never see it, so a client cannot use the id of another client's request."""
    sent = next((value for name, value in headers if name == REQUEST_ID.encode()), b"")
    usable = len(sent) <= MAX_REQUEST_ID and all(0x20 <= letter < 0x7F for letter in sent)
    return (sent.decode() if sent and usable else uuid.uuid4().hex), not usable
