"""Agreement of all ranks on the copies from which a run continues, and on whether new copies are made."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from strata.platform.hardware.machine import available_memory
from strata.platform.recipe import ModelSection, ParallelSection
from strata.training.checkpoint.format import Checkpoint, Origin
from strata.training.checkpoint.storage import folder as storage_folder
from strata.training.memory_copies import folders
from strata.training.memory_copies.copier import Copier
from strata.training.memory_copies.copy_file import Copy, is_intact
from strata.training.memory_copies.recovery import complete, newest_whole
from strata.training.parallel import optimizer_state

LARGEST_SHARE = 0.5  # of the memory that is available, for all copies on a node


@dataclass(frozen=True)
class Memory:
    """Copies that restarted workers found. `whole` is the newest step of which all ranks' copies are there, None without one."""

    folder: Path
    ranks_here: int
    whole: Checkpoint | None

    def copier(self, engine: Any, model: ModelSection, parallel: ParallelSection, origin: Origin, every: int) -> Copier | None:
        """Copier of this rank, None if there is too little memory on some node. Called by all ranks, after a load."""
        fragments = list(optimizer_state.fragments(engine, model, parallel))
        needed = 2 * self.ranks_here * sum(part.values.nbytes for part in fragments)
        free = _free(self.folder)
        shortages: list[str | None] = [None] * dist.get_world_size()
        short = f"they need {needed / 2**30:.1f} GiB in {self.folder.parent}, and may use {free / 2**30:.1f} GiB"
        dist.all_gather_object(shortages, short if needed > free else None)
        rank, ranks = dist.get_rank(), len(shortages)
        if shortage := next(filter(None, shortages), None):
            if rank == 0:
                print(f"Without copies of the state in memory: {shortage}. A lost worker costs the steps since a checkpoint.")
            return None
        older = [path for path in self.folder.glob("rank-*") if self.whole and path.name in _files(self.whole)]
        copier = Copier(self.folder, fragments, origin, rank, ranks, every, older)
        optimizer_state.before_update(engine, copier.before_update)
        return copier


def find(run: str, origin: Origin, last: Callable[[], int]) -> Memory | None:
    """Finds the copies of the run with this id, and removes those that are of no use. `last` returns the last step in the run's
    history. None if a node has no folder for copies. Called by all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder = folders.folder(run)
    here = folders.identity(folder) if folder else None
    nodes: list[str | None] = [here] * ranks
    dist.all_gather_object(nodes, here)
    if folder is None or None in nodes:
        return None
    neighbours = [other for other in range(ranks) if nodes[other] == here]
    share = complete(folder, origin)[neighbours.index(rank) :: len(neighbours)]
    intact = [copy for copy in share if is_intact(folder / copy.manifest.file, copy)]
    found: list[tuple[list[Copy], int]] = [(intact, 0)] * ranks
    dist.all_gather_object(found, (intact, last() if rank == 0 else 0))
    whole = newest_whole((copy for copies, _ in found for copy in copies), last=found[0][1])
    checkpoint = None
    if whole:
        checkpoint = Checkpoint(storage_folder(folder), whole[0].step, tuple(copy.manifest for copy in whole))
    for path in folder.glob("rank-*"):
        if checkpoint is None or path.name not in _files(checkpoint):
            path.unlink(missing_ok=True)
    return Memory(folder, len(neighbours), checkpoint)


def _files(checkpoint: Checkpoint) -> set[str]:
    return {manifest.file for manifest in checkpoint.manifests}


def _free(folder: Path) -> float:
    """Bytes that copies may use, including those of older copies, which are replaced."""
    space = os.statvfs(folder)
    older = sum(path.stat().st_size for path in folder.glob("rank-*"))
    return min(space.f_bavail * space.f_frsize + older, LARGEST_SHARE * (available_memory() + older))
