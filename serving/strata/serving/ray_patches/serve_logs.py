"""Keeps Ray Serve's log handlers open in a replica that imports libraries which configure logging.

`logging.config.dictConfig`, which vLLM calls when it is imported, closes every handler of the process. A closed `MemoryHandler`
has lost its target: records of the replica are then kept in memory and never written, and `is_allocated()`, the first call of a
restarted Serve controller, raises. The controller takes that for a broken replica and stops it, which ends the endpoint.

Written for Ray 2.60. No longer needed when `ray.serve._private.logging_utils.get_component_logger_file_path` accepts a handler
without a target; the test of this file notices.
"""

import logging
from logging.handlers import MemoryHandler

LOGGER = "ray.serve"


def keep_open() -> None:
    """Call it before the import. The file behind a handler may be closed: it opens again with the next record."""
    for handler in logging.getLogger(LOGGER).handlers:
        if isinstance(handler, MemoryHandler):
            handler.close = handler.flush  # type: ignore[method-assign]
