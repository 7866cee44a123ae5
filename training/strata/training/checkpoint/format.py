"""Checksummed checkpoint format that loads in any parallel layout.

Each rank writes one data file and then a manifest. The manifest maps the file's values to elements of the whole model's
parameters and holds the file's digest. A checkpoint is valid only if every rank's manifest is present and every file matches
it; a checkpoint that was interrupted by a kill lacks manifests. Nothing in it depends on the layout that saved it.

The newest valid checkpoint is searched for in storage. Ray's controller would return the last one that it registered, which
after a failure can be older than the last one uploaded, and it does not detect truncated files.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from strata.platform import file_errors
from strata.platform.errors import UserError
from strata.platform.recipe import TrainSection
from strata.platform.runs import Run
from strata.training.checkpoint.storage import Folder, folder
from strata.training.parallel.optimizer_state import Fragment
from strata.training.parallel.shard_map import Cut

RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"
UNFINISHED = ".unfinished"  # marker in a checkpoint's folder until the last rank has written its manifest
ASIDE = ".damaged"
STEP = re.compile(r"step-(\d{8,})")
READ_BYTES = 16 << 20


class Damaged(Exception):
    """Raised with a description of the damage to a checkpoint."""


class Unfinished(Damaged):
    """Raised for a checkpoint that was interrupted before all ranks had written it."""


@dataclass(frozen=True)
class Origin:
    """Model and data order that a checkpoint belongs to; it loads only into the same ones, in any layout. `run` is the id of
    the run that wrote it, empty in checkpoints from before runs had ids."""

    model: dict[str, Any]
    tokens: str
    batch: int
    seed: int
    run: str = ""


@dataclass(frozen=True)
class Stored:
    """Location of a fragment in a file: `count` values from byte `at` on."""

    name: str
    kind: str
    shape: tuple[int, ...]
    cut: Cut | None
    start: int
    count: int
    at: int


@dataclass(frozen=True)
class Manifest:
    step: int
    origin: Origin
    ranks: int
    file: str
    size: int
    sha256: str
    stored: tuple[Stored, ...]
    val_loss: float | None = None

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def parse(text: bytes) -> "Manifest":
        raw = json.loads(text)
        stored = tuple(
            Stored(**(s | {"shape": tuple(s["shape"]), "cut": Cut(**s["cut"]) if s["cut"] else None})) for s in raw["stored"]
        )
        return Manifest(**(raw | {"origin": Origin(**raw["origin"]), "stored": stored}))


@dataclass(frozen=True)
class Checkpoint:
    folder: Folder
    step: int
    manifests: tuple[Manifest, ...]

    @property
    def origin(self) -> Origin:
        return self.manifests[0].origin

    @property
    def identity(self) -> str:
        """Digest over all manifests. Two checkpoints with the same identity have the same content."""
        parts = sorted(f"{manifest.step} {manifest.file} {manifest.sha256}" for manifest in self.manifests)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def size(self) -> int:
        return sum(manifest.size for manifest in self.manifests)

    def whole_at(self) -> float | None:
        """Unix time at which the last rank wrote its manifest; None if the storage has no modification times."""
        times = [self.folder.written_at(name) for name in self.folder.names() if _is_manifest(name)]
        return max((at for at in times if at is not None), default=None)


def location(run: Run, train: TrainSection) -> Folder:
    return folder(train.checkpoints) / run.name if train.checkpoints else folder(run.checkpoints)


def folder_name(step: int) -> str:
    return f"step-{step:08}"


def write(
    folder: Folder, rank: int, ranks: int, step: int, origin: Origin, val_loss: float | None, parts: list[Fragment]
) -> None:
    """Writes this rank's file, then its manifest, which marks the file as complete. A failed write leaves no file behind: on a
    full disk the next attempt needs the space."""
    folder.create(UNFINISHED).close()
    name = f"part-{rank:05}.bin"
    try:
        manifest = _write_part(folder, name, ranks, step, origin, val_loss, parts)
        folder.write(f"manifest-{rank:05}.json", manifest.dump())
    except BaseException as error:
        with suppress(OSError):
            folder.delete(name)
            folder.delete(f".manifest-{rank:05}.json")
        if isinstance(error, OSError) and error.filename is None:  # Arrow's errors lack the path
            raise OSError(file_errors.number_of(error), str(error), f"{folder.path}/{name}") from error
        raise
    if written(folder) == ranks:
        with suppress(FileNotFoundError):  # two ranks may both find that they were the last
            folder.delete(UNFINISHED)


def _write_part(
    folder: Folder, name: str, ranks: int, step: int, origin: Origin, val_loss: float | None, parts: list[Fragment]
) -> Manifest:
    digest, at, stored = hashlib.sha256(), 0, []
    with folder.create(name) as stream:
        for part in parts:
            data = part.values.numpy().view(np.uint8).data
            digest.update(data)
            stream.write(data)
            shard = part.shard
            stored.append(Stored(shard.name, part.kind, shard.shape, shard.cut, part.start, part.values.numel(), at))
            at += len(data)
    return Manifest(step, origin, ranks, name, at, digest.hexdigest(), tuple(stored), val_loss)


def written(folder: Folder) -> int:
    """Number of ranks that have written their manifest."""
    return sum(_is_manifest(name) for name in folder.names())


def examine(folder: Folder) -> Checkpoint:
    """Checks that every rank's file and manifest are present and have the right size. Does not read the files' content."""
    try:
        manifests = tuple(Manifest.parse(folder.read(name)) for name in folder.names() if _is_manifest(name))
    except PermissionError:
        raise
    except OSError as error:
        raise Damaged(f"a manifest cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise Damaged("a manifest is truncated") from None
    if not manifests or len(manifests) != manifests[0].ranks or len({manifest.step for manifest in manifests}) != 1:
        raise Unfinished("it is incomplete")
    for manifest in manifests:
        size = folder.size(manifest.file)
        if size is None:
            raise Damaged(f"{manifest.file} is missing")
        if size != manifest.size:
            raise Damaged(f"{manifest.file} has {size} of {manifest.size} bytes")
    return Checkpoint(folder, manifests[0].step, manifests)


def verify(checkpoint: Checkpoint, manifests: Iterable[Manifest] | None = None) -> None:
    """Compares files with their digests: all of them, or those of `manifests`, for ranks that divide the work."""
    with ThreadPoolExecutor(4) as pool:
        chosen = checkpoint.manifests if manifests is None else manifests
        for _ in pool.map(lambda manifest: _verify_file(checkpoint.folder, manifest), chosen):
            pass


def newest(checkpoints: Folder, say: Callable[[str], None], check: Callable[[Checkpoint], None] = verify) -> Checkpoint | None:
    """Newest valid checkpoint, None if none was ever completed. Raises if there are checkpoints but all are damaged."""
    lost = False
    for name in step_names(checkpoints):
        try:
            found = examine(checkpoints / name)
            check(found)
            return found
        except Damaged as damage:
            lost |= not isinstance(damage, Unfinished)
            say(f"Checkpoint {name} is damaged ({damage}); trying the previous one.")
    if lost:
        raise UserError(
            f"All checkpoints in {checkpoints.path} are damaged.", "Restore the files, or start a new run: --run NAME."
        )
    return None


def prune(checkpoints: Folder, keep: int, keep_best: bool) -> Checkpoint | None:
    """Deletes old checkpoints, except the newest `keep` complete ones, the one with the lowest validation loss, and any that is
    still being written. Returns the newest."""
    whole = []
    for name in step_names(checkpoints):
        try:
            whole.append(examine(checkpoints / name))
        except Damaged:
            continue
    evaluated = [found for found in whole if _val_loss(found) is not None]
    best = min(evaluated, key=lambda found: (_val_loss(found), -found.step), default=None) if keep_best else None
    for old in whole[keep:]:
        if best is None or old.step != best.step:
            old.folder.remove()
    return whole[0] if whole else None


def set_aside_after(checkpoints: Folder, step: int) -> list[str]:
    """Renames checkpoints after `step`, for a run that continues from there: they are damaged or abandoned, and their names will
    be reused. Deletes only incomplete checkpoints, which cannot be loaded, and Ray's own list, which would make Ray fail on a
    checkpoint that no longer exists. Returns the new names."""
    aside = []
    for name in step_names(checkpoints):
        if is_unfinished(checkpoints / name):
            (checkpoints / name).remove()
        elif step_of(name) > step:
            aside.append(_free_name(checkpoints, name + ASIDE))
            checkpoints.rename(name, aside[-1])
    checkpoints.delete(RAY_SNAPSHOT)
    return aside


def is_unfinished(folder: Folder) -> bool:
    """True if a write was interrupted: the marker is present and at least one rank's manifest is not."""
    try:
        names = folder.names()
    except NotADirectoryError:  # a file with that name, not written by Strata
        return False
    if not names:
        return True
    if UNFINISHED not in names:
        return False
    try:
        examine(folder)
    except Unfinished:
        return True
    except Damaged:
        return False
    return False


def _free_name(checkpoints: Folder, name: str) -> str:
    taken = checkpoints.names()
    return next(free for free in (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3))) if free not in taken)


def step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def step_names(checkpoints: Folder) -> list[str]:
    """Names of checkpoint folders, newest first."""
    return sorted((name for name in checkpoints.names() if STEP.fullmatch(name)), key=step_of, reverse=True)


def _is_manifest(name: str) -> bool:
    return name.startswith("manifest-")


def _val_loss(checkpoint: Checkpoint) -> float | None:
    return checkpoint.manifests[0].val_loss


def _verify_file(folder: Folder, manifest: Manifest) -> None:
    digest = hashlib.sha256()
    try:
        with folder.filesystem.open_input_stream(f"{folder.path}/{manifest.file}") as stream:
            while data := stream.read(READ_BYTES):
                digest.update(data)
    except PermissionError:
        raise
    except OSError as error:
        raise Damaged(f"{manifest.file} cannot be read: {error}") from None
    if digest.hexdigest() != manifest.sha256:
        raise Damaged(f"{manifest.file} has changed since it was written")
