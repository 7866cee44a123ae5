"""Detects lost nodes and a dead Ray cluster while a command waits.

Ray reports a lost node after 30 s and a dead GCS after 60 s, with pages of its log, and then ends the process. This module
looks at the processes of a cluster that this process started, and connects to any other cluster every few seconds. It does so
from a thread, because a call to a dead GCS blocks.
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
    """Raised within `cluster.connected` by a command whose cluster will not recover.

    `run` names a run that can resume on a new cluster without the user. It must do so in a new process: a thread that still
    waits for the dead cluster would end this one at its next call."""

    def __init__(self, cause: str, fix: str, run: str | None = None) -> None:
        super().__init__(cause, fix)
        self.run = run


LOOK_EVERY_S = 2.0
SILENT_S = 10.0  # without an answer from the GCS: the machine may be busy, or `gcs.py` may be restarting it
PARTS = {"gcs_server": "control service (GCS)", "raylet": "node service (raylet)"}


class ClusterWatch:
    """Watches the connected cluster. `ours`: this process started the cluster."""

    def __init__(self, ours: bool) -> None:
        import ray

        self._ours = ours
        self._address = ray.get_runtime_context().gcs_address
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._answered = self._gcs_seen = time.monotonic()
        self._workers: list[psutil.Process] = []
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="cluster-watch", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def news(self) -> list[str]:
        """One line for each node that left or joined since the last call."""
        lines = []
        while not self._messages.empty():
            lines.append(self._messages.get())
        return lines

    def death(self) -> str | None:
        """A sentence if the cluster has died and will not recover, else None."""
        part = dead_part() if self._ours else None
        if part != "gcs_server":
            self._gcs_seen = time.monotonic()
        if self._ours:
            lost = part == "raylet" or time.monotonic() - self._gcs_seen > SILENT_S
            return f"Ray's {PARTS[part]} on this machine has died." if part and lost else None
        silent = time.monotonic() - self._answered
        return f"The Ray cluster at {self._address} has not answered for {silent:.0f} s." if silent > SILENT_S else None

    def kill_what_is_left(self) -> None:
        """Kills the workers of a dead local cluster, which would write to the files of their run for some seconds more.

        Once their raylet is gone they are not descendants of this process, so the watch thread records them in advance."""
        for process in self._workers:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._workers, timeout=10)

    def _run(self) -> None:
        nodes: dict[str, dict[str, Any]] = {}
        while not self._ended.wait(LOOK_EVERY_S):
            if not self._ours:
                if not _accepts(self._address):
                    continue
                self._answered = time.monotonic()
            if dead_part():  # `death` reports it
                continue
            if self._ours:
                self._workers = _started_by_raylet() or self._workers
            try:
                now = _alive_nodes()
            except Exception:  # Ray raises many types while a service goes away; `death` reports it
                continue
            for line in changes(nodes, now):
                self._messages.put(line)
            nodes = now


def dead_part() -> str | None:
    """The Ray service that has ended, if this process started the cluster."""
    import ray._private.worker

    node = ray._private.worker._global_node
    dead = {kind for kind, _ in node.dead_processes()} if node else set()
    return next((kind for kind in ("raylet", "gcs_server") if kind in dead), None)


def _started_by_raylet() -> list[psutil.Process]:
    """Ray's workers on this machine, if this process started the cluster."""
    import ray._private.worker

    node = ray._private.worker._global_node
    pids = [info.process.pid for info in node.all_processes.get("raylet", [])] if node else []
    try:
        return [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def disconnecting() -> Iterator[None]:
    """Disconnects from Ray when the block ends.

    After `ClusterDied` it skips `ray.shutdown`, which may block on the dead cluster, and kills the remaining processes of a
    cluster that this process started."""
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
    """One line per node that left or joined. Empty on the first call, with nothing to compare with."""
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
