"""Request ids in the log lines of gateways and replicas, and lines as JSON.

Ray Serve writes the lines, as text or as JSON, and both have a field for a request id. Serve knows no id of these requests,
which do not pass through it, so a filter of its logger adds the client's.
"""

import logging
import os
from contextvars import ContextVar
from typing import Any

VARIABLE = "STRATA_LOG"
LOGGER = "ray.serve"

current: ContextVar[str] = ContextVar("request_id", default="")


def install() -> None:
    """Call it in each process that handles requests."""
    logging.getLogger(LOGGER).addFilter(_add_request_id)


def options() -> dict[str, Any]:
    """Options of a Ray Serve deployment for the log format of this environment."""
    return {"logging_config": {"encoding": "JSON"}} if as_json() else {}


def as_json() -> bool:
    return os.environ.get(VARIABLE, "").lower() == "json"


def _add_request_id(record: logging.LogRecord) -> bool:
    if request := current.get():
        record.request_id = request
    return True
