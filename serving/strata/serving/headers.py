"""The response headers the server sets and the client reads."""

PREFILL = "x-strata-prefill"  # where the prompt was prefilled, and by which engine or why not remotely
WAITED = "x-strata-waited"  # seconds that it waited because no engine was up
REQUEST_ID = "x-request-id"
