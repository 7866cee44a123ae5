"""Watches the Ray cluster of a command that waits: lost nodes, and a cluster that has died.

Ray itself reports a lost node after half a minute and a dead control service after one, with pages of its own log, and then
ends the process. This looks at the processes of a cluster of ours, and asks any other every few seconds from a thread: a call
to a control service that is gone blocks.
"""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from strata.platform.errors import UserError


class ClusterDied(UserError):
    """Raised inside of `cluster.connected`, by a command whose cluster will not come back. `run` names a run that can go on in
    a new cluster by itself. Not in this process: a thread that still waits for the dead cluster would end it at its next
    call."""

    def __init__(self, cause: str, fix: str, run: str | None = None) -> None:
        super().__init__(cause, fix)
        self.run = run


LOOK_EVERY_S = 2.0
SILENT_S = 10.0  # for which a control service may not answer: a busy machine is not a dead one, and `gcs.py` restarts ours
PARTS = {"gcs_server": "control service (GCS)", "raylet": "node service (raylet)"}


class ClusterWatch:
    """Started while connected to Ray. `ours` says whether the cluster belongs to this process."""

    def __init__(self, ours: bool) -> None:
        import ray

        self._ours = ours
        self._address = ray.get_runtime_context().gcs_address
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._answered = self._gcs_seen = time.monotonic()
        self._family: list[psutil.Process] = []
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="cluster-watch", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def news(self) -> list[str]:
        """One line for each node that was lost or came since the last call."""
        lines = []
        while not self._messages.empty():
            lines.append(self._messages.get())
        return lines

    def death(self) -> str | None:
        """A sentence on a cluster that will not come back, None for one that lives."""
        part = dead_part() if self._ours else None
        if part != "gcs_server":
            self._gcs_seen = time.monotonic()
        if self._ours:
            lost = part == "raylet" or time.monotonic() - self._gcs_seen > SILENT_S
            return f"Ray's {PARTS[part]} on this machine has died." if part and lost else None
        silent = time.monotonic() - self._answered
        return f"The Ray cluster at {self._address} has not answered for {silent:.0f} s." if silent > SILENT_S else None

    def kill_what_is_left(self) -> None:
        """Workers of a dead cluster of ours live on for some seconds, and would go on writing to the files of their run. They
        are no children of anybody we know once their raylet is gone, so they are remembered from before."""
        for process in self._family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._family, timeout=10)

    def _run(self) -> None:
        nodes: dict[str, dict[str, Any]] = {}
        while not self._ended.wait(LOOK_EVERY_S):
            if not self._ours:
                if not _accepts(self._address):
                    continue
                self._answered = time.monotonic()
            if dead_part():  # `death` says what that means
                continue
            if self._ours:
                self._family = _started_by_raylet() or self._family
            try:
                now = _alive_nodes()
            except Exception:  # Ray's client has many errors for a service that is going away, which `death` will report
                continue
            for line in changes(nodes, now):
                self._messages.put(line)
            nodes = now


def dead_part() -> str | None:
    """The service of a cluster started by this process that has ended, if any."""
    import ray._private.worker

    node = ray._private.worker._global_node
    dead = {kind for kind, _ in node.dead_processes()} if node else set()
    return next((kind for kind in ("raylet", "gcs_server") if kind in dead), None)


def _started_by_raylet() -> list[psutil.Process]:
    """Ray's workers on this machine, of a cluster started by this process."""
    import ray._private.worker

    node = ray._private.worker._global_node
    pids = [info.process.pid for info in node.all_processes.get("raylet", [])] if node else []
    try:
        return [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def left_well() -> Iterator[None]:
    """Ends the connection to Ray with this block. A cluster that died is left without a word to Ray's client, which may be
    waiting for it, and what is left of it is killed if this process started it."""
    import ray
    import ray._private.worker

    try:
        yield
    except ClusterDied:
        if node := ray._private.worker._global_node:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        raise
    except BaseException:
        ray.shutdown()
        raise
    ray.shutdown()


def changes(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """Lines on the nodes that went and came. The first look has nothing to compare with."""
    if not before:
        return []
    cpus = sum(node["Resources"].get("CPU", 0) for node in now.values())
    lines = [
        f"Ray node {before[key]['NodeManagerAddress']} was lost; {len(now)} are left, with {cpus:g} CPUs."
        for key in before.keys() - now.keys()
    ]
    return lines + [f"Ray node {now[key]['NodeManagerAddress']} has joined." for key in now.keys() - before.keys()]


def _alive_nodes() -> dict[str, dict[str, Any]]:
    import ray

    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True
