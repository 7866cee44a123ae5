"""Starts a Ray cluster on this machine for the length of a block, with retries for a busy machine."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil

from strata.platform.errors import UserError
from strata.platform.processes import environment
from strata.platform.ray_cluster import gcs, watch
from strata.platform.ray_patches import agent_ports, fewer_processes, loopback_address, raylet_log_lines, registration_timeout

LOOPBACK = "127.0.0.1"
START_TRIES = 2
# Short on purpose: Ray creates Unix sockets in it, and a socket's path is limited to 107 characters.
TEMP_DIR = Path(f"/tmp/strata-ray-{os.getuid()}")


@contextmanager
def running(cpus: int | None, dashboard: bool) -> Iterator[Any]:
    """A cluster that ends with this block. Yields the return value of `ray.init`."""
    with loopback_address.used(), environment(_worker_environment()), ExitStack() as stores:
        context = _start(cpus, dashboard, stores)
        raylet_log_lines.suppress()
        with watch.disconnecting(), gcs.restarted_on_failure():
            yield context


def _start(cpus: int | None, dashboard: bool, stores: ExitStack) -> Any:
    """Calls `ray.init`, and retries once after a timeout: the machine may be less busy by then."""
    import ray

    for tries_left in reversed(range(START_TRIES)):
        before = set(psutil.Process().children(recursive=True))
        store = stores.enter_context(gcs.store(TEMP_DIR))  # a new one per try: a failed start leaves an unusable store
        try:
            with registration_timeout.extended(), agent_ports.chosen(), nullcontext() if dashboard else fewer_processes.skipped():
                return ray.init(**_options(cpus, dashboard), _system_config=store)
        except OSError:
            raise
        except Exception as error:
            ray.shutdown()
            for process in set(psutil.Process().children(recursive=True)) - before:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if not tries_left or not any(sign in str(error).lower() for sign in ("timed out", "failed to connect")):
                reason = " ".join(str(error).split())[:300]
                raise UserError(f"The local Ray cluster did not start: {reason}", "See 'strata doctor'.") from None
            print("Ray did not start, as happens on a busy machine; trying once more.", file=sys.stderr)
    raise AssertionError("unreachable")


def _worker_environment() -> dict[str, str]:
    """Variables for Ray's workers, less those the user has set. NCCL, gloo, UCX and vLLM listen on loopback only."""
    interface = next(name for name, addresses in psutil.net_if_addrs().items() if any(a.address == LOOPBACK for a in addresses))
    variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES"), interface)
    variables |= {"VLLM_HOST_IP": LOOPBACK, "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray runs workers at nice 15 by default, behind everything else on the machine. Here they are the user's main work.
    variables |= {"RAY_worker_niceness": "0"}
    return {name: value for name, value in variables.items() if name not in os.environ}


def _options(cpus: int | None, dashboard: bool) -> dict[str, Any]:
    return {
        "address": "local",
        "num_cpus": max(os.cpu_count() or 1, cpus or 1),
        "include_dashboard": dashboard,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "object_store_memory": 256 * 2**20,
        "_temp_dir": str(TEMP_DIR),
    }
