"""Starts a local Ray cluster without the log monitor and the dashboard process.

Each takes 1 to 3 seconds of a core to start. The log monitor has nothing to forward: `log_to_driver` is off. Ray starts the
dashboard process even with `include_dashboard=False`, for usage statistics, which are off, and `ray.init` waits for it. The
autoscaler's monitor still starts: it counts the nodes that the cluster dashboard in Grafana shows.

Written for Ray 2.60. No longer needed when `ray.init` has options for both processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

SKIPPED = ("start_log_monitor", "start_api_server")  # methods of `ray._private.node.Node`


@contextmanager
def skipped() -> Iterator[None]:
    """Applies to clusters started in this block."""
    from ray._private.node import Node

    originals = {name: getattr(Node, name) for name in SKIPPED}
    for name in SKIPPED:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in originals.items():
            setattr(Node, name, method)
