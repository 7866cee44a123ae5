"""The Ray cluster a command runs on: one that is named, one that we keep, or one for the length of the command.

A cluster of ours hangs from one process that called `ray.init`, and Ray's processes share its fate: ending that process,
even with SIGKILL, ends them (two of Ray's agents take a minute to notice), and no other cluster on the machine, as
`ray stop` would. Its files are in a folder of their own, so that `ray.init("auto")` in someone else's shell never finds
our cluster instead of theirs.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from strata.platform import cluster_watch
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.platform.processes import is_alive

START_TIMEOUT_S = 240.0
START_TRIES = 2
REGISTER_S = 90.0
SLOW_S = 20.0
# Short on purpose: Ray puts sockets in it, and a socket's path may have 107 characters.
TEMP_DIR = Path(f"/tmp/strata-ray-{os.getuid()}")


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
    if kept := find():
        return kept
    log = cache_dir() / "cluster.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "strata.platform.cluster", json.dumps({"cpus": cpus, "dashboard": dashboard})]
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
    keeper = psutil.Process(kept.pid)
    keeper.send_signal(signal.SIGTERM)
    try:
        keeper.wait(timeout=30)
    except psutil.TimeoutExpired:
        keeper.kill()
    _record().unlink(missing_ok=True)
    return True


@contextmanager
def connected(cpus: int) -> Iterator[bool]:
    """RAY_ADDRESS first, then the cluster we keep, else a new one that ends with this block; yields whether it will.

    `cpus` is what the caller will ask Ray for: a new cluster offers at least that many (a one-core machine still runs
    two workers, slowly)."""
    import ray

    kept = find()
    address = os.environ.get("RAY_ADDRESS") or (kept.address if kept else None)
    if address is None:
        _start_local(cpus, dashboard=False)
    else:
        _join(address, cpus)
    _hush()
    try:
        yield address is None
    except cluster_watch.ClusterDied:
        cluster_watch.abandon()
        raise
    except BaseException:
        ray.shutdown()
        raise
    ray.shutdown()


def _start_local(cpus: int | None, dashboard: bool) -> Any:
    """A start that is too slow even so is ended and tried once more: a busy machine may be less busy by then."""
    import ray

    for tries_left in reversed(range(START_TRIES)):
        before = set(psutil.Process().children(recursive=True))
        try:
            with _patience():
                return ray.init(**_local(cpus, dashboard))
        except OSError:
            raise
        except Exception as error:
            ray.shutdown()
            for process in set(psutil.Process().children(recursive=True)) - before:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if not tries_left or "timed out" not in str(error).lower():
                reason = " ".join(str(error).split())[:300]
                raise UserError(f"The local Ray cluster did not start: {reason}", "See 'strata doctor'.") from None
            print("Ray did not start in time, as happens on a busy machine; trying once more.", file=sys.stderr)
    raise AssertionError("unreachable")


@contextmanager
def _patience() -> Iterator[None]:
    """Ray gives its node service 30 s to register, in a constant (`_private/node.py`): too short for a busy machine. The call
    that it repeats in that time waits longer instead. Written for Ray 2.60; not needed once the time can be set."""
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


def _hush() -> None:
    """Ray prints the last 20 lines of a dead raylet's log on the driver's terminal, whatever `log_to_driver` says. Commands say
    in one line of their own that it died (`cluster_watch`). Written for Ray 2.60; not needed once `log_to_driver=False` covers
    these messages."""
    import ray._private.worker as worker

    shown = worker.print_to_stdstream
    if getattr(shown, "hushed", False):
        return

    def show(data: dict[str, Any], *arguments: Any, **options: Any) -> None:
        if not any("Raylet is terminated" in line for line in data.get("lines", ())):
            shown(data, *arguments, **options)

    show.hushed = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = show


def _join(address: str, cpus: int) -> None:
    import ray
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    # Ray protects a new local cluster with a token in the user's home (its ports are open on every interface), but does
    # not by itself use that token to join one.
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


def _local(cpus: int | None, dashboard: bool) -> dict[str, Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default Ray's workers give way to everything else on the machine (nice 15), and those are what the user waits for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    return {
        "address": "local",
        "num_cpus": max(os.cpu_count() or 1, cpus or 1),
        "include_dashboard": dashboard,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "object_store_memory": 256 * 2**20,
        "_temp_dir": str(TEMP_DIR),
    }


def _keep(cpus: int | None, dashboard: bool) -> None:
    """The process that a kept cluster hangs from; ends on SIGTERM."""
    import ray

    context = _start_local(cpus, dashboard)
    me = psutil.Process()
    kept = Kept(context.address_info["address"], me.pid, me.create_time(), context.dashboard_url or None)
    write_atomic(_record(), json.dumps(asdict(kept)))
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    ray.shutdown()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    _keep(**json.loads(sys.argv[1]))
