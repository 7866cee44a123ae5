"""Finds the newest step of which the whole model's state is in memory."""

from collections.abc import Iterable
from pathlib import Path

from strata.training.checkpoint.format import Checkpoint, Origin
from strata.training.checkpoint.storage import folder as storage_folder
from strata.training.memory_copies import folders
from strata.training.memory_copies.copy_file import Copy, examine, is_intact


def newest(run: str, origin: Origin) -> Checkpoint | None:
    """Newest whole copy on this node, of the run with this id. `resharding.Reader` reads it in any layout."""
    path = folders.folder(run)
    if path is None:
        return None
    found = newest_whole(copy for copy in complete(path, origin) if is_intact(path / copy.manifest.file, copy))
    return Checkpoint(storage_folder(path), found[0].step, tuple(copy.manifest for copy in found)) if found else None


def complete(path: Path, origin: Origin) -> list[Copy]:
    """Complete copies of a run's folder, in the order of their files."""
    found = (examine(file) for file in sorted(path.glob("rank-*")))
    return [copy for copy in found if copy and copy.manifest.origin == origin]


def newest_whole(copies: Iterable[Copy], last: int | None = None) -> list[Copy]:
    """The copies of all ranks of the newest step that has them, up to step `last`; empty without one. Of several copies of a
    rank, the first counts."""
    by_step: dict[tuple[int, int], dict[int, Copy]] = {}
    for copy in copies:
        by_step.setdefault((copy.step, copy.ranks), {}).setdefault(copy.rank, copy)
    whole = [(step, ranks) for (step, ranks), found in by_step.items() if len(found) == ranks and (last is None or step <= last)]
    return list(by_step[max(whole)].values()) if whole else []
