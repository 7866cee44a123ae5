"""Extends the time that `ray.init` waits for its raylet to register with the GCS.

`ray._private.node.Node` waits 30 s, a constant, which is too short on a busy machine. It repeats `services.get_node` for that
time. The replacement retries inside that call for up to `REGISTER_S`.

Written for Ray 2.60. No longer needed when `raylet_start_wait_time_s` in `ray/_private/node.py` can be configured.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

REGISTER_S = 90.0
SLOW_S = 20.0


@contextmanager
def extended() -> Iterator[None]:
    """Applies the longer timeout to clusters started in this block."""
    import ray._private.services as services

    get_node = services.get_node

    def retry(*arguments: Any) -> Any:
        begin, reported = time.monotonic(), False
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                waited = time.monotonic() - begin
                if waited > REGISTER_S:
                    raise
                if waited > SLOW_S and not reported:
                    print("Ray is starting slowly, as happens on a busy machine; still waiting.", file=sys.stderr)
                    reported = True
                time.sleep(0.1)

    services.get_node = retry
    try:
        yield
    finally:
        services.get_node = get_node
