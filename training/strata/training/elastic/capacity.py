"""Capacity of a Ray cluster in workers, observed from a thread."""

import socket
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.platform.ray_cluster import excluded_nodes
from strata.platform.ray_cluster.excluded_nodes import Excluded, Node
from strata.platform.recipe import ParallelSection
from strata.training.patches import node_state

LOOK_EVERY_S = 1.0
CONNECT_S = 2.0
ROUNDING = 1e-6  # Ray counts resources in steps of 1e-4


@dataclass(frozen=True)
class Survey:
    """Nodes of the cluster at one moment."""

    free: int  # workers that fit on the free resources of nodes that will stay and are not excluded
    usable: frozenset[str]  # ids of the nodes that answer
    draining: frozenset[str]
    excluded: Mapping[str, Excluded] = field(default_factory=dict)  # of the usable nodes
    nodes: Mapping[str, Node] = field(default_factory=dict)  # usable nodes that have the resources of a worker, free or not
    fits: Mapping[str, int] = field(default_factory=dict)  # workers that fit on the free resources, of nodes that will stay

    def free_without(self, avoided: Collection[str]) -> int:
        return sum(count for node, count in self.fits.items() if node not in avoided)


def resources(parallel: ParallelSection) -> dict[str, float]:
    """Ray resources of one worker."""
    return {"CPU": float(parallel.cpus_per_worker)} | ({"GPU": 1.0} if parallel.device == "gpu" else {})


def survey(worker: dict[str, float], run: Path) -> Survey:
    """Reads the nodes. A raylet that does not accept connections is dead, also before Ray notices that after half a minute."""
    import ray

    draining, free = node_state.draining(), node_state.free_resources()
    usable = {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and _answers(node)}
    places = {node: Node(node, one["NodeManagerHostname"], one["NodeManagerAddress"]) for node, one in usable.items()}
    excluded = excluded_nodes.matched(excluded_nodes.read(run), places)
    fits = {node: fitting(free.get(node, {}), worker) for node in usable.keys() - draining}
    able = {node: place for node, place in places.items() if fitting(usable[node]["Resources"], worker)}
    free_workers = sum(count for node, count in fits.items() if node not in excluded)
    return Survey(free_workers, frozenset(usable), draining, excluded, able, fits)


def survey_within(seconds: float, worker: dict[str, float], run: Path) -> Survey | None:
    """A survey by a thread, None if it takes longer: a call to a dead GCS blocks."""
    found: list[Survey] = []

    def look() -> None:
        with suppress(Exception):  # as in `CapacityWatch`
            found.append(survey(worker, run))

    thread = threading.Thread(target=look, name="survey", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def fitting(free: dict[str, float], worker: dict[str, float]) -> int:
    """Workers that fit on one node."""
    return min(int(free.get(name, 0.0) / amount + ROUNDING) for name, amount in worker.items())


def _answers(node: dict[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


class CapacityWatch:
    """Thread with the newest survey. A call to a dead GCS blocks, so the driver never makes it."""

    def __init__(self, worker: dict[str, float], run: Path) -> None:
        self._worker, self._run_folder = worker, run
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._surveys = 0
        self.newest: Survey | None = None
        threading.Thread(target=self._run, name="capacity-watch", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def next(self, timeout: float) -> Survey | None:
        """A survey that began after this call, None if there is none in time."""
        with self._changed:
            needed = self._surveys + 2  # the one under way may have read the nodes already
            return self.newest if self._changed.wait_for(lambda: self._surveys >= needed, timeout) else None

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            with suppress(Exception):  # Ray raises many types while a service goes away; `ClusterWatch` reports it
                found = survey(self._worker, self._run_folder)
                with self._changed:
                    self.newest = found
                    self._surveys += 1
                    self._changed.notify_all()
