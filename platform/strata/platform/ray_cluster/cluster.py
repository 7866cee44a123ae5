"""Selects the Ray cluster of a command: `RAY_ADDRESS`, a background cluster, or a new one for the length of the command.

Strata's clusters belong to one process, which called `ray.init`. When it ends, even by SIGKILL, Ray's processes end too
(two of Ray's agents need a minute to notice). Other clusters on the machine are not affected, unlike with `ray stop`. The
files are in a separate temporary folder, so `ray.init("auto")` in another shell never finds a cluster of Strata's.
"""

import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.platform.processes import is_alive
from strata.platform.ray_cluster import local_ray, watch
from strata.platform.ray_patches import loopback_address, raylet_log_lines

START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class BackgroundCluster:
    """A local cluster that outlives the command which started it: `strata cluster start`."""

    address: str
    pid: int
    pid_created: float
    dashboard: str | None


def _record() -> Path:
    return cache_dir() / "cluster.json"


def find() -> BackgroundCluster | None:
    try:
        cluster = BackgroundCluster(**json.loads(_record().read_text()))
    except FileNotFoundError:
        return None
    if not is_alive(cluster.pid, cluster.pid_created):
        _record().unlink(missing_ok=True)
        return None
    return cluster


def start(cpus: int | None = None, dashboard: bool = False) -> BackgroundCluster:
    """Returns the running background cluster, or starts one. A file lock makes concurrent commands start only one."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held for at most START_TIMEOUT_S
        return find() or _start(cpus, dashboard)


def _start(cpus: int | None, dashboard: bool) -> BackgroundCluster:
    log = cache_dir() / "cluster.log"
    command = [sys.executable, "-m", "strata.platform.ray_cluster.cluster", json.dumps({"cpus": cpus, "dashboard": dashboard})]
    with log.open("wb") as output:
        owner = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and owner.poll() is None:
        if cluster := find():
            return cluster
        time.sleep(0.1)
    owner.kill()
    tail = " ".join(log.read_text(errors="replace").split()[-40:])
    raise UserError(f"The local Ray cluster did not start: {tail}", f"See {log} and 'strata doctor'.")


def stop() -> bool:
    cluster = find()
    if cluster is None:
        return False
    with suppress(psutil.NoSuchProcess):  # it may end on its own meanwhile
        owner = psutil.Process(cluster.pid)
        owner.send_signal(signal.SIGTERM)
        try:
            owner.wait(timeout=30)
        except psutil.TimeoutExpired:
            owner.kill()
    _record().unlink(missing_ok=True)
    return True


def is_given() -> bool:
    """True if a cluster exists before this command: that of `RAY_ADDRESS`, or the background one."""
    return bool(os.environ.get("RAY_ADDRESS")) or find() is not None


@contextmanager
def connected(cpus: int, spare: int = 0, least: int | None = None) -> Iterator[bool]:
    """Connects to `RAY_ADDRESS`, else the background cluster, else a new cluster that ends with this block.

    Yields whether the cluster ends with the block. `cpus` is the number the caller will request from Ray. A new cluster
    offers at least that many, so that a one-core machine runs two workers, slowly. It offers `spare` more because a GCS that
    dies while starting an actor loses the CPUs it had allocated to it. An existing cluster needs to have `least` of them."""
    cluster = find()
    address = os.environ.get("RAY_ADDRESS") or (cluster.address if cluster else None)
    if address is None:
        with local_ray.running(max(os.cpu_count() or 1, cpus) + spare, dashboard=False):
            yield True
        return
    with loopback_address.used() if _only_on_loopback(address) else nullcontext():
        _join(address, cpus if least is None else least)
        raylet_log_lines.suppress()
        with watch.disconnecting():
            yield False


def _join(address: str, cpus: int) -> None:
    import ray
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    logging.getLogger("ray").setLevel(logging.ERROR)
    if not _answers(address):
        raise UserError(f"No Ray cluster answers at {address}.", "Correct RAY_ADDRESS, or unset it to use a local cluster.")
    # Ray protects a new local cluster with a token in the user's home directory, but does not use it to join one.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"Could not connect to the Ray cluster at {address}: {error}", "Unset RAY_ADDRESS to use a local cluster."
        ) from None
    has = ray.cluster_resources().get("CPU", 0)
    if has < cpus and not grows():
        ray.shutdown()
        raise UserError(
            f"The Ray cluster at {address} has {has:g} CPUs; {cpus} are needed.", "Use fewer workers or a larger cluster."
        )


def grows() -> bool:
    """True if an autoscaler adds the nodes that requests need. True in pods of KubeRay, which sets this variable."""
    return os.environ.get("RAY_USAGE_STATS_KUBERAY_IN_USE") == "1"


def _answers(address: str) -> bool:
    """True if the port accepts connections. Ray itself would retry for minutes. Names such as `auto` are left to Ray."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return True
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def _only_on_loopback(address: str) -> bool:
    """True if the address is a cluster on this machine that listens on loopback only, as Strata's do."""
    from ray._private import services

    host, _, port = address.rpartition(":")
    return host in (local_ray.LOOPBACK, "localhost") and not _answers(f"{services.resolve_ip_for_localhost(host)}:{port}")


def _run_in_background(cpus: int | None, dashboard: bool) -> None:
    """Owns the background cluster in a process of its own, until SIGTERM."""
    with local_ray.running(cpus, dashboard) as context:
        me = psutil.Process()
        cluster = BackgroundCluster(context.address_info["address"], me.pid, me.create_time(), context.dashboard_url or None)
        write_atomic(_record(), json.dumps(asdict(cluster)))
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    _run_in_background(**json.loads(sys.argv[1]))
