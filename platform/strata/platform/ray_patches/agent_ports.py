"""Chooses the ports of a node's agents before its raylet starts.

By default the agents choose them and write them to files. The raylet waits 15 s for each file, a constant, and then aborts: too
short on a busy machine, where an agent imports for longer. A raylet with given ports does not wait for files. It cannot be given
the port of the dashboard's agent, so that file is written here.

Written for Ray 2.60. No longer needed when `NodeManager::WaitForDashboardAgentPorts` has a time that can be configured.
"""

import inspect
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
RANGE = range(20000, 32768)  # below the ports that Linux assigns, so no other program gets one of them by chance


@contextmanager
def chosen() -> Iterator[None]:
    """Applies to clusters started in this block."""
    import ray._private.services as services
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

    start_raylet = services.start_raylet
    signature = inspect.signature(start_raylet)

    def start(*arguments: Any, **options: Any) -> Any:
        missing = [name for name in PORTS if not options.get(name)]
        options |= dict(zip(missing, free(len(missing)), strict=True))
        given = signature.bind(*arguments, **options).arguments
        persist_port(
            given["session_dir"], given["node_id"], DASHBOARD_AGENT_LISTEN_PORT_NAME, given["dashboard_agent_listen_port"]
        )
        return start_raylet(*arguments, **options)

    services.start_raylet = start
    try:
        yield
    finally:
        services.start_raylet = start_raylet


def free(count: int) -> list[int]:
    """Different free ports."""
    found: list[int] = []
    with ExitStack() as held:
        for port in random.sample(RANGE, len(RANGE)):
            if len(found) == count:
                return found
            one = held.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("", port))
                found.append(port)
    raise OSError(f"No {count} ports from {RANGE.start} to {RANGE.stop - 1} are free.")
