"""Copies on other nodes, for the loss of a whole node.

With several nodes, each has a holder: an actor that owns the node's folder, stores copies of another node's ranks, and reads
copies for ranks elsewhere. Nodes form a ring, and a rank's copy goes to the next node. So every copy is on two nodes, and each
node stores as much for others as it sends. Holders belong to the run's controller and end with it.
"""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.training.checkpoint.storage import Folder
from strata.training.memory_copies import folders
from strata.training.memory_copies.copy_file import CopyFile

CALL_S = 60.0


class Holder:
    """Actor of one node."""

    def __init__(self, run: str) -> None:
        self._run, self._stack = run, ExitStack()
        self._stack.enter_context(folders.owned(run))

    def ready(self) -> bool:
        return folders.folder(self._run) is not None

    def store(self, name: str, data: NDArray[np.uint8]) -> None:
        """Replaces a copy. The old one is removed first, so a rank has at most two copies here."""
        folder = folders.folder(self._run)
        if folder is None:  # the run has ended
            return
        (folder / name).unlink(missing_ok=True)
        unfinished = folder / f"incoming-{name}"
        with unfinished.open("wb") as file:
            file.write(data.data)
        unfinished.rename(folder / name)

    def read(self, name: str, at: int, count: int) -> bytes:
        folder = folders.folder(self._run)
        assert folder
        with (folder / name).open("rb") as file:
            file.seek(at)
            return file.read(count)

    def close(self) -> None:
        self._stack.close()


@dataclass
class Holders:
    """Holders of a run, in the process of Ray Train's controller: a dropped handle would end its actor."""

    run: str
    _actors: dict[str, Any] = field(default_factory=dict)

    def start_missing(self) -> None:
        """Starts a holder on each node that has none, if there are several nodes. Without one, workers make no copies."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = _nodes()
        if len(nodes) < 2 or not self.run:
            return
        for node in nodes:
            if node not in self._actors:
                place = NodeAffinitySchedulingStrategy(node, soft=False)
                options: dict[str, Any] = {"num_cpus": 0, "name": _name(self.run, node), "scheduling_strategy": place}
                self._actors[node] = ray.remote(Holder).options(**options, get_if_exists=True).remote(self.run)
        for node, actor in list(self._actors.items()):
            try:
                ray.get(actor.ready.remote(), timeout=CALL_S)
            except RayError as error:
                print(f"Node {node[:8]} has no holder of memory copies: {error}", file=sys.stderr)
                del self._actors[node]


def close(run: str) -> None:
    """Removes the copies of a run on all nodes. Called by the driver, which may not be the controller."""
    import ray
    from ray.exceptions import RayError

    for node in _nodes() if run else []:
        try:
            ray.get(ray.get_actor(_name(run, node)).close.remote(), timeout=CALL_S)
        except (ValueError, RayError):  # it has no holder, or lost it
            continue


def _nodes() -> list[str]:
    import ray

    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _name(run: str, node: str) -> str:
    return f"strata-copies-{run}-{node}"


@dataclass(frozen=True)
class Ring:
    """Nodes of a job's ranks, in the order of their first ranks. `here` is this rank's."""

    run: str
    nodes: tuple[str, ...]  # Ray's ids
    here: str

    def send(self, file: CopyFile) -> None:
        """Sends a complete copy to the next node. Raises OSError if that node does not answer."""
        import ray
        from ray.exceptions import RayError

        after = self.nodes[(self.nodes.index(self.here) + 1) % len(self.nodes)]
        try:
            ray.get(self.holder(after).store.remote(file.path.name, file.data()), timeout=CALL_S)
        except (ValueError, RayError) as error:
            raise OSError(f"node {after[:8]} does not answer: {type(error).__name__}") from error

    def holder(self, node: str) -> Any:
        import ray

        return ray.get_actor(_name(self.run, node))


@dataclass(frozen=True)
class SpreadFolder(Folder):
    """Folder of copies of which some are on other nodes: `remote` maps their names to holders."""

    remote: Mapping[str, Any] = field(default_factory=dict)

    def open(self, name: str) -> Any:
        return _RemoteFile(self.remote[name], name) if name in self.remote else super().open(name)


@dataclass(frozen=True)
class _RemoteFile:
    holder: Any
    name: str

    def read_at(self, count: int, at: int) -> bytes:
        import ray

        data: bytes = ray.get(self.holder.read.remote(self.name, at, count), timeout=CALL_S)
        return data
