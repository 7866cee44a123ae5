"""Makes Ray use 127.0.0.1 as this machine's node address, so that all of Ray's servers listen on loopback only.

Ray replaces a loopback node address by the machine's external one unless `ENABLE_RAY_CLUSTER` is off, its switch for systems
on which a cluster has a single node (Windows and macOS). Ray reads the switch from the environment once, on import.

Written for Ray 2.60. No longer needed when `ray.init(_node_ip_address="127.0.0.1")` keeps that address on Linux.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from strata.platform.processes import environment


@contextmanager
def used() -> Iterator[None]:
    """Applies to this process and to the processes started in this block."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    with environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before
