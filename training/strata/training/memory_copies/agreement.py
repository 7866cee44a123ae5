"""Agreement of all ranks on the copies from which a run continues, and on whether new copies are made."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from strata.platform.hardware.machine import available_memory
from strata.platform.recipe import ModelSection, ParallelSection
from strata.training.checkpoint.format import Checkpoint, Origin
from strata.training.checkpoint.storage import folder as storage_folder
from strata.training.memory_copies import folders
from strata.training.memory_copies.copier import Copier
from strata.training.memory_copies.copy_file import is_intact
from strata.training.memory_copies.peers import Ring, SpreadFolder
from strata.training.memory_copies.recovery import complete, newest_whole
from strata.training.parallel import optimizer_state

T = TypeVar("T")
LARGEST_SHARE = 0.5  # of the memory that is available, for all copies on a node


@dataclass(frozen=True)
class Memory:
    """Copies that restarted workers found. `whole` is the newest step of which all ranks' copies are there, None without one.
    `ring` has the nodes of the job, None for one node."""

    folder: Path
    ranks_here: int
    ring: Ring | None
    whole: Checkpoint | None

    def copier(self, engine: Any, model: ModelSection, parallel: ParallelSection, origin: Origin, every: int) -> Copier | None:
        """Copier of this rank, None if there is too little memory on some node. Called by all ranks, after a load."""
        fragments = list(optimizer_state.fragments(engine, model, parallel))
        holders = 1 if self.ring is None else 2
        needed = 2 * holders * self.ranks_here * sum(part.values.nbytes for part in fragments)
        free = _free(self.folder)
        short = f"they need {needed / 2**30:.1f} GiB in {self.folder.parent}, and may use {free / 2**30:.1f} GiB"
        rank, ranks = dist.get_rank(), dist.get_world_size()
        shortages = _gathered(short if needed > free else None)
        if shortage := next(filter(None, shortages), None):
            if rank == 0:
                print(f"Without copies of the state in memory: {shortage}. A lost worker costs the steps since a checkpoint.")
            return None
        older = [path for path in self.folder.glob("rank-*") if self.whole and path.name in _files(self.whole)]
        send = self.ring.send if self.ring else None
        copier = Copier(self.folder, fragments, origin, rank, ranks, every, older, send)
        optimizer_state.before_update(engine, copier.before_update)
        return copier


def find(run: str, origin: Origin, last: Callable[[], int]) -> Memory | None:
    """Finds the copies of the run with this id, and removes those that are of no use. `last` returns the last step in the run's
    history. None if a node has no folder for copies. Called by all ranks."""
    rank = dist.get_rank()
    folder = folders.folder(run)
    here = folders.identity(folder) if folder else None
    places = _gathered(here)
    if folder is None or None in places:
        return None
    ring, nodes = _ring(run, places)
    neighbours = [other for other, place in enumerate(places) if place == here]
    share = complete(folder, origin)[neighbours.index(rank) :: len(neighbours)]
    intact = [copy for copy in share if is_intact(folder / copy.manifest.file, copy)]
    found = _gathered((intact, last() if rank == 0 else 0))
    near = [copy for other in neighbours for copy in found[other][0]]
    whole = newest_whole([*near, *(copy for copies, _ in found for copy in copies)], last=found[0][1])
    checkpoint = None
    if whole:
        local = {copy.manifest.file for copy in near}
        far = {copy.manifest.file: nodes[other] for other, (copies, _) in enumerate(found) for copy in copies}
        remote = {name: ring.holder(node) for name, node in far.items() if ring and name not in local}
        place = SpreadFolder(storage_folder(folder).filesystem, str(folder), remote)
        checkpoint = Checkpoint(place, whole[0].step, tuple(copy.manifest for copy in whole))
    for path in folder.iterdir():
        if path.name.startswith(("rank-", "incoming-")) and (checkpoint is None or path.name not in _files(checkpoint)):
            path.unlink(missing_ok=True)
    return Memory(folder, len(neighbours), ring, checkpoint)


def _ring(run: str, places: list[str | None]) -> tuple[Ring | None, list[str]]:
    """Ring of the job's nodes, None for one node, and Ray's id of each rank's node."""
    if len(set(places)) == 1:
        return None, [""] * len(places)
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = _gathered(here)
    first = dict(reversed(list(zip(places, nodes, strict=True))))
    return Ring(run, tuple(dict.fromkeys(first[place] for place in places)), first[places[dist.get_rank()]]), nodes


def _gathered(one: T) -> list[T]:
    """Values of all ranks."""
    values = [one] * dist.get_world_size()
    dist.all_gather_object(values, one)
    return values


def _files(checkpoint: Checkpoint) -> set[str]:
    return {manifest.file for manifest in checkpoint.manifests}


def _free(folder: Path) -> float:
    """Bytes that copies may use, including those of older copies, which are replaced."""
    space = os.statvfs(folder)
    older = sum(path.stat().st_size for path in folder.glob("rank-*"))
    return min(space.f_bavail * space.f_frsize + older, LARGEST_SHARE * (available_memory() + older))
