"""The headers that server and clients exchange."""

import uuid

PREFILL = "x-strata-prefill"  # where the prompt was prefilled, and by which engine or why not remotely
WAITED = "x-strata-waited"  # seconds that it waited because no engine was up
REQUEST_ID = "x-request-id"  # the client's, or one of ours; in every answer
MAX_REQUEST_ID = 512


def request_id(headers: list[tuple[bytes, bytes]]) -> tuple[str, bool]:
    """The id to answer with, and whether the client sent one that cannot be used: it must be printable ASCII of bounded length.
    Engines never see it, so that no client can choose another's."""
    sent = next((value for name, value in headers if name == REQUEST_ID.encode()), b"")
    usable = len(sent) <= MAX_REQUEST_ID and all(0x20 <= letter < 0x7F for letter in sent)
    return (sent.decode() if sent and usable else uuid.uuid4().hex), not usable
