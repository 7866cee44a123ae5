"""The Ray cluster a command runs on: one that is named, one that we keep, or one for the length of the command.

A cluster of ours hangs from one process that called `ray.init`, and Ray's processes share its fate: ending that process,
even with SIGKILL, ends them (two of Ray's agents take a minute to notice), and no other cluster on the machine, as
`ray stop` would. Its files are in a folder of their own, so that `ray.init("auto")` in someone else's shell never finds
our cluster instead of theirs.
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

START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Kept:
    """A cluster that outlives the command which started it: `strata cluster start`."""

    address: str
    pid: int
    pid_created: float
    dashboard: str | None


def _record() -> Path:
    return cache_dir() / "cluster.json"


def find() -> Kept | None:
    try:
        kept = Kept(**json.loads(_record().read_text()))
    except FileNotFoundError:
        return None
    if not is_alive(kept.pid, kept.pid_created):
        _record().unlink(missing_ok=True)
        return None
    return kept


def start(cpus: int | None = None, dashboard: bool = False) -> Kept:
    """The cluster that is up already, or a new one. Two commands at once start one: the second waits for the first one's."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # no longer than START_TIMEOUT_S
        return find() or _start(cpus, dashboard)


def _start(cpus: int | None, dashboard: bool) -> Kept:
    log = cache_dir() / "cluster.log"
    command = [sys.executable, "-m", "strata.platform.ray_cluster.cluster", json.dumps({"cpus": cpus, "dashboard": dashboard})]
    with log.open("wb") as output:
        keeper = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and keeper.poll() is None:
        if kept := find():
            return kept
        time.sleep(0.1)
    keeper.kill()
    tail = " ".join(log.read_text(errors="replace").split()[-40:])
    raise UserError(f"The local Ray cluster did not start: {tail}", f"See {log} and 'strata doctor'.")


def stop() -> bool:
    kept = find()
    if kept is None:
        return False
    with suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
        keeper = psutil.Process(kept.pid)
        keeper.send_signal(signal.SIGTERM)
        try:
            keeper.wait(timeout=30)
        except psutil.TimeoutExpired:
            keeper.kill()
    _record().unlink(missing_ok=True)
    return True


@contextmanager
def connected(cpus: int, spare: int = 0) -> Iterator[bool]:
    """RAY_ADDRESS first, then the cluster we keep, else a new one that ends with this block; yields whether it will.

    `cpus` is what the caller will ask Ray for: a new cluster offers at least that many (a one-core machine still runs
    two workers, slowly), and `spare` more: a GCS that dies while it starts an actor forgets the CPUs that it gave out for it."""
    kept = find()
    address = os.environ.get("RAY_ADDRESS") or (kept.address if kept else None)
    if address is None:
        with local_ray.running(max(os.cpu_count() or 1, cpus) + spare, dashboard=False):
            yield True
        return
    with local_ray.on_loopback() if _only_on_loopback(address) else nullcontext():
        _join(address, cpus)
        local_ray.hush()
        with watch.left_well():
            yield False


def _join(address: str, cpus: int) -> None:
    import ray
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    # Ray protects a new local cluster with a token in the user's home, but does not by itself use that token to join one.
    logging.getLogger("ray").setLevel(logging.ERROR)
    if not _answers(address):
        raise UserError(
            f"Nothing answers at {address}, where RAY_ADDRESS says a Ray cluster is.", "Unset RAY_ADDRESS to use a local one."
        )
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"The Ray cluster at {address} cannot be joined: {error}", "Unset RAY_ADDRESS to use a local one."
        ) from None
    has = ray.cluster_resources().get("CPU", 0)
    if has < cpus and not grows():
        ray.shutdown()
        raise UserError(
            f"The Ray cluster at {address} has {has:g} CPUs; this needs {cpus}.", "Use fewer workers, or another cluster."
        )


def grows() -> bool:
    """Whether Ray's autoscaler brings what is asked for and not there yet: in pods of KubeRay, which says so in them."""
    return os.environ.get("RAY_USAGE_STATS_KUBERAY_IN_USE") == "1"


def _answers(address: str) -> bool:
    """Asked first, for Ray itself would retry for minutes. Names such as `auto` are Ray's to resolve."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return True
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def _only_on_loopback(address: str) -> bool:
    """Whether a cluster on this machine, such as one of ours, listens nowhere else."""
    from ray._private import services

    host, _, port = address.rpartition(":")
    return host in (local_ray.LOOPBACK, "localhost") and not _answers(f"{services.resolve_ip_for_localhost(host)}:{port}")


def _keep(cpus: int | None, dashboard: bool) -> None:
    """The process that a kept cluster hangs from; ends on SIGTERM."""
    with local_ray.running(cpus, dashboard) as context:
        me = psutil.Process()
        kept = Kept(context.address_info["address"], me.pid, me.create_time(), context.dashboard_url or None)
        write_atomic(_record(), json.dumps(asdict(kept)))
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    _keep(**json.loads(sys.argv[1]))
