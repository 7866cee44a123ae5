"""Starts a Ray cluster on this machine that lasts as long as the caller wants it, also where the machine is busy.

Some of it replaces functions of Ray's, each for the reason that stands beside it. Written for Ray 2.60.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil

from strata.platform.errors import UserError
from strata.platform.ray_cluster import gcs, watch

LOOPBACK = "127.0.0.1"
START_TRIES = 2
REGISTER_S = 90.0
SLOW_S = 20.0
# Short on purpose: Ray puts sockets in it, and a socket's path may have 107 characters.
TEMP_DIR = Path(f"/tmp/strata-ray-{os.getuid()}")


@contextmanager
def running(cpus: int | None, dashboard: bool) -> Iterator[Any]:
    """A cluster that ends with this block; yields what `ray.init` returned."""
    with on_loopback(), _variables(_of_workers()), ExitStack() as stores:
        context = _start(cpus, dashboard, stores)
        hush()
        with watch.left_well(), gcs.kept_alive():
            yield context


def _start(cpus: int | None, dashboard: bool, stores: ExitStack) -> Any:
    """A start that is too slow even so is ended and tried once more: a busy machine may be less busy by then."""
    import ray

    for tries_left in reversed(range(START_TRIES)):
        before = set(psutil.Process().children(recursive=True))
        store = stores.enter_context(gcs.store(TEMP_DIR))  # a new one each time: what a failed start left is of no use
        try:
            with _patience(), nullcontext() if dashboard else _without_helpers():
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


@contextmanager
def _patience() -> Iterator[None]:
    """Ray gives its node service 30 s to register, in a constant (`_private/node.py`): too short for a busy machine. The call
    that it repeats in that time waits longer instead. Not needed once the time can be set."""
    import ray._private.services as services

    registered = services.get_node

    def wait(*arguments: Any) -> Any:
        begin, told = time.monotonic(), False
        while True:
            try:
                return registered(*arguments)
            except RuntimeError:
                waited = time.monotonic() - begin
                if waited > REGISTER_S:
                    raise
                if waited > SLOW_S and not told:
                    print("Ray is starting slowly, as happens on a busy machine; still waiting.", file=sys.stderr)
                    told = True
                time.sleep(0.1)

    services.get_node = wait
    try:
        yield
    finally:
        services.get_node = registered


@contextmanager
def _without_helpers() -> Iterator[None]:
    """Two processes less, each of which takes 1 to 3 seconds of a core to start: the log monitor, which has nothing to forward
    (`log_to_driver` is off), and, for usage statistics alone, which are off, the dashboard's, for which `ray.init` waits. The
    autoscaler's monitor stays: it counts the nodes that the cluster board shows. Not needed once Ray has an option."""
    from ray._private.node import Node

    names = ("start_log_monitor", "start_api_server")
    before = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def hush() -> None:
    """Ray prints the last 20 lines of a dead raylet's log on the driver's terminal, whatever `log_to_driver` says. Commands say
    in one line of their own that it died (`cluster_watch`). Not needed once `log_to_driver=False` covers these messages."""
    import ray._private.worker as worker

    shown = worker.print_to_stdstream
    if getattr(shown, "hushed", False):
        return

    def show(data: dict[str, Any], *arguments: Any, **options: Any) -> None:
        if not any("Raylet is terminated" in line for line in data.get("lines", ())):
            shown(data, *arguments, **options)

    show.hushed = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = show


@contextmanager
def on_loopback() -> Iterator[None]:
    """Has Ray in this process and its children use 127.0.0.1 as the address of this machine's node, so that all of Ray's
    servers listen there only. Ray replaces a loopback address that it is given by the machine's outer one, unless this switch
    says that clusters have one node, as on the systems it is named for."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    with _variables({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
        ray_constants.ENABLE_RAY_CLUSTER = False  # read from the environment when Ray was imported
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before


def _of_workers() -> dict[str, str]:
    """What Ray's workers inherit from this process, where the user has set nothing else. The libraries in them listen on the
    loopback interface only."""
    interface = next(name for name, addresses in psutil.net_if_addrs().items() if any(a.address == LOOPBACK for a in addresses))
    variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES"), interface)
    variables |= {"VLLM_HOST_IP": LOOPBACK, "RAY_USAGE_STATS_ENABLED": "0"}
    # By default Ray's workers give way to everything else on the machine (nice 15), and those are what the user waits for.
    variables |= {"RAY_worker_niceness": "0"}
    return {name: value for name, value in variables.items() if name not in os.environ}


@contextmanager
def _variables(variables: dict[str, str]) -> Iterator[None]:
    """Sets them until the block ends: what this process starts later is none of this cluster's."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
