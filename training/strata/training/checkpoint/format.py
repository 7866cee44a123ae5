"""Checkpoints that can be trusted, and that open in any layout.

Each rank writes one file of numbers and, after it, a manifest that says which elements of which of the whole model's parameters
they are, and the file's digest. A checkpoint counts only if every rank's manifest is there and every file agrees with it: one
that was interrupted by a kill has fewer manifests than its ranks. Nothing in it depends on the layout it was saved in.

The newest good one is looked for in storage. Ray's controller would hand back the last one it has registered, which after a
failure can be older than the last one uploaded, and it would not notice a file that was cut short.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strata.platform import file_errors
from strata.platform.errors import UserError
from strata.platform.recipe import TrainSection
from strata.platform.runs import Run
from strata.training.checkpoint.storage import Folder, folder
from strata.training.parallel.optimizer_state import Fragment
from strata.training.parallel.shard_map import Cut, Piece

RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"
UNFINISHED = ".unfinished"  # in a checkpoint's folder from the first rank's first byte to the last rank's manifest
ASIDE = ".damaged"
STEP = re.compile(r"step-(\d{8,})")
READ_AT_ONCE = 16 << 20


class Damaged(Exception):
    """Says what is wrong with a checkpoint."""


class Unfinished(Damaged):
    """It never was one: whoever wrote it was stopped before the end."""


@dataclass(frozen=True)
class Origin:
    """What a checkpoint can be loaded into: the same model and order of data, in whatever layout. And the id of the run that
    wrote it, empty in checkpoints from before runs had one."""

    model: dict[str, Any]
    tokens: str
    batch: int
    seed: int
    run: str = ""


@dataclass(frozen=True)
class Stored:
    """A fragment in a file: `values` of it from byte `at` on."""

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
        """The same for two looks at a checkpoint only if its files are to have the same content."""
        parts = sorted(f"{manifest.step} {manifest.file} {manifest.sha256}" for manifest in self.manifests)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def size(self) -> int:
        return sum(manifest.size for manifest in self.manifests)

    def whole_at(self) -> float | None:
        """When the last rank wrote its manifest, in Unix seconds; None where the storage does not say."""
        times = [self.folder.written_at(name) for name in self.folder.names() if _is_manifest(name)]
        return max((at for at in times if at is not None), default=None)


def location(run: Run, train: TrainSection) -> Folder:
    return folder(f"{train.checkpoints}/{run.name}" if train.checkpoints else run.checkpoints)


def folder_name(step: int) -> str:
    return f"step-{step:08}"


def write(
    folder: Folder, rank: int, ranks: int, step: int, origin: Origin, val_loss: float | None, parts: list[Fragment]
) -> None:
    """This rank's part. The manifest comes last: with it the part is whole. A part that cannot be written leaves no file, for
    on a full disk the next attempt needs its space."""
    folder.create(UNFINISHED).close()
    name = f"part-{rank:05}.bin"
    try:
        manifest = _write_part(folder, name, ranks, step, origin, val_loss, parts)
        folder.write(f"manifest-{rank:05}.json", manifest.dump())
    except BaseException as error:
        with suppress(OSError):
            folder.delete(name)
            folder.delete(f".manifest-{rank:05}.json")
        if isinstance(error, OSError) and error.filename is None:  # Arrow does not say where
            raise OSError(file_errors.number_of(error), str(error), f"{folder.path}/{name}") from error
        raise
    if written(folder) == ranks:
        with suppress(FileNotFoundError):  # two ranks may see at once that they were the last
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
            piece = part.piece
            stored.append(Stored(piece.name, part.kind, piece.shape, piece.cut, part.start, part.values.numel(), at))
            at += len(data)
    return Manifest(step, origin, ranks, name, at, digest.hexdigest(), tuple(stored), val_loss)


def written(folder: Folder) -> int:
    """How many ranks have written theirs."""
    return sum(_is_manifest(name) for name in folder.names())


def examine(folder: Folder) -> Checkpoint:
    """Everything but the digests: every rank has written its part, to the end."""
    try:
        manifests = tuple(Manifest.parse(folder.read(name)) for name in folder.names() if _is_manifest(name))
    except PermissionError:
        raise
    except OSError as error:
        raise Damaged(f"a manifest cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise Damaged("a manifest is cut short") from None
    if not manifests or len(manifests) != manifests[0].ranks or len({manifest.step for manifest in manifests}) != 1:
        raise Unfinished("it was not written to the end")
    for manifest in manifests:
        size = folder.size(manifest.file)
        if size is None:
            raise Damaged(f"{manifest.file} is missing")
        if size != manifest.size:
            raise Damaged(f"{manifest.file} has {size} of {manifest.size} bytes")
    return Checkpoint(folder, manifests[0].step, manifests)


def verify(checkpoint: Checkpoint, manifests: Iterable[Manifest] | None = None) -> None:
    """The digests, of all files or, where ranks share the work, of some."""
    with ThreadPoolExecutor(4) as pool:
        chosen = checkpoint.manifests if manifests is None else manifests
        for _ in pool.map(lambda manifest: _verify_file(checkpoint.folder, manifest), chosen):
            pass


def newest(checkpoints: Folder, say: Callable[[str], None], check: Callable[[Checkpoint], None] = verify) -> Checkpoint | None:
    """None if none was ever finished; an error if some were and none is whole any more."""
    lost = False
    for name in step_names(checkpoints):
        try:
            found = examine(checkpoints / name)
            check(found)
            return found
        except Damaged as damage:
            lost |= not isinstance(damage, Unfinished)
            say(f"Checkpoint {name} is damaged ({damage}); looking at the one before it.")
    if lost:
        raise UserError(f"No checkpoint in {checkpoints.path} is whole.", "Restore the files, or train again (--run).")
    return None


def prune(checkpoints: Folder, keep: int, keep_best: bool) -> Checkpoint | None:
    """Leaves the newest `keep` whole ones, the one with the lowest validation loss, and any that is still being written.
    Returns the newest."""
    whole = []
    for name in step_names(checkpoints):
        try:
            whole.append(examine(checkpoints / name))
        except Damaged:
            continue
    judged = [found for found in whole if _val_loss(found) is not None]
    best = min(judged, key=lambda found: (_val_loss(found), -found.step), default=None) if keep_best else None
    for old in whole[keep:]:
        if best is None or old.step != best.step:
            old.folder.remove()
    return whole[0] if whole else None


def set_aside_after(checkpoints: Folder, step: int) -> list[str]:
    """Makes room for a run that goes on from `step`: what lies beyond it is damaged or abandoned, and its names will be used
    again. Checkpoints are renamed, never deleted; only a write of ours that was cut short, which nobody can load, goes. So does
    Ray's own list, which would make Ray fail on a checkpoint that is gone. Returns the new names."""
    aside = []
    for name in step_names(checkpoints):
        if is_cut_short(checkpoints / name):
            (checkpoints / name).remove()
        elif step_of(name) > step:
            aside.append(_free_name(checkpoints, name + ASIDE))
            checkpoints.rename(name, aside[-1])
    checkpoints.delete(RAY_SNAPSHOT)
    return aside


def is_cut_short(folder: Folder) -> bool:
    """Whether its writers were stopped: their mark is still there and the manifest of at least one rank is not."""
    try:
        names = folder.names()
    except NotADirectoryError:  # a file of that name, which is not ours
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
    """Newest first."""
    return sorted((name for name in checkpoints.names() if STEP.fullmatch(name)), key=step_of, reverse=True)


class Reader:
    """Pieces in any cut, from a checkpoint in any other."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder
        self._stored: dict[tuple[str, str], list[tuple[str, Stored]]] = {}
        for manifest in checkpoint.manifests:
            for stored in manifest.stored:
                self._stored.setdefault((stored.name, stored.kind), []).append((manifest.file, stored))
        self._files: dict[str, Any] = {}

    def names(self) -> list[str]:
        return sorted({name for name, _ in self._stored})

    def read(self, piece: Piece, kind: str) -> Tensor:
        parts = self._parts(piece, kind)
        if all(stored.cut == piece.cut for _, stored in parts):
            return self._filled(parts, piece, 0, piece.numel).view(piece.local_shape)
        whole = torch.empty(piece.shape)
        for cut in {stored.cut for _, stored in parts}:
            same = replace(piece, cut=cut)
            values = self._filled([(file, s) for file, s in parts if s.cut == cut], same, 0, same.numel)
            _narrow(whole, cut).copy_(values.view(same.local_shape))
        return _narrow(whole, piece.cut).contiguous()

    def read_range(self, piece: Piece, kind: str, first: int, last: int) -> Tensor:
        """Elements `first` to `last` of a piece, flattened. Nothing else is read where the checkpoint has the same cut."""
        parts = self._parts(piece, kind)
        if all(stored.cut == piece.cut for _, stored in parts):
            return self._filled(parts, piece, first, last)
        return self.read(piece, kind).flatten()[first:last]

    def whole(self, name: str) -> Tensor:
        """A weight, as an export wants it."""
        shape = self._stored[name, "weight"][0][1].shape
        return self.read(Piece(name, shape, None, 0), "weight")

    def _parts(self, piece: Piece, kind: str) -> list[tuple[str, Stored]]:
        parts = [(file, s) for file, s in self._stored[piece.name, kind] if _overlap(s.cut, piece.cut)]
        shape = parts[0][1].shape
        assert shape == piece.shape, f"{piece.name} is {shape} in the checkpoint and {piece.shape} here"
        return parts

    def _filled(self, parts: list[tuple[str, Stored]], piece: Piece, first: int, last: int) -> Tensor:
        flat, filled = torch.empty(last - first), 0
        for file, stored in parts:
            low, high = max(first, stored.start), min(last, stored.start + stored.count)
            if low >= high:
                continue
            data = self._read_at(file, stored.at + 4 * (low - stored.start), 4 * (high - low))
            flat[low - first : high - first] = torch.from_numpy(np.frombuffer(data, np.float32).copy())
            filled += high - low
        assert filled == last - first, f"{piece.name} is not whole in the checkpoint"
        return flat

    def _read_at(self, file: str, at: int, count: int) -> bytes:
        if file not in self._files:
            self._files[file] = self._folder.open(file)
        data: bytes = self._files[file].read_at(count, at)
        return data


def _is_manifest(name: str) -> bool:
    return name.startswith("manifest-")


def _narrow(whole: Tensor, cut: Cut | None) -> Tensor:
    return whole if cut is None else whole.narrow(cut.dim, cut.start, cut.stop - cut.start)


def _overlap(one: Cut | None, other: Cut | None) -> bool:
    if one is None or other is None or one.dim != other.dim:
        return True
    return one.start < other.stop and other.start < one.stop


def _val_loss(checkpoint: Checkpoint) -> float | None:
    return checkpoint.manifests[0].val_loss


def _verify_file(folder: Folder, manifest: Manifest) -> None:
    digest = hashlib.sha256()
    try:
        with folder.filesystem.open_input_stream(f"{folder.path}/{manifest.file}") as stream:
            while data := stream.read(READ_AT_ONCE):
                digest.update(data)
    except PermissionError:
        raise
    except OSError as error:
        raise Damaged(f"{manifest.file} cannot be read: {error}") from None
    if digest.hexdigest() != manifest.sha256:
        raise Damaged(f"{manifest.file} has changed since it was written")
