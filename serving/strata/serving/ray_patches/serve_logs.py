"""Keeps Ray Serve's log handlers open in a replica that imports libraries which configure logging.

`logging.config.dictConfig`, which vLLM calls on import, closes every handler of the process. A closed `MemoryHandler` loses its
target: the replica's records then stay in memory and are never written, and `is_allocated()`, the first call of a restarted
Serve controller, raises. The controller treats that as a broken replica and stops it, which ends the endpoint.

Written for Ray 2.60. No longer needed when `ray.serve._private.logging_utils.get_component_logger_file_path` accepts a handler
without a target; the test of this file fails then.
"""

import logging
from logging.handlers import MemoryHandler

LOGGER = "ray.serve"


def keep_open() -> None:
    """Call it before the import. The file behind a handler may still be closed: it reopens with the next record."""
    for handler in logging.getLogger(LOGGER).handlers:
        if isinstance(handler, MemoryHandler):
            handler.close = handler.flush  # type: ignore[method-assign]
