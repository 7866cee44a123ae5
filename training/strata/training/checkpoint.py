"""Checkpoints that can be trusted: each rank writes its part with a manifest of sizes and digests, Ray Train uploads the parts
into one folder, and a checkpoint counts only if every rank's manifest is there and every file agrees with it.

The newest good one is looked for in storage. Ray's controller would hand back the last one it has registered, which after a
failure can be older than the last one uploaded, and it would not notice a file that was cut short.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError

ENGINE = "engine"  # the folder, in a checkpoint, that DeepSpeed writes to and reads from
RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"


class Damaged(Exception):
    """Says what is wrong with a checkpoint."""


@dataclass(frozen=True)
class Origin:
    """What a checkpoint can be loaded into: the same model, tokens and layout of ranks."""

    model: dict[str, Any]
    tokens: str
    workers: int
    zero: int


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    origin: Origin


def save(engine: Any, checkpoints: Path, step: int, origin: Origin, keep: int) -> None:
    """All ranks call this. Returns when the checkpoint is whole in storage and the ones beyond `keep` are gone."""
    import ray.train
    import torch.distributed as dist

    with tempfile.TemporaryDirectory(prefix="strata-checkpoint-") as folder:
        local = Path(folder)
        engine.save_checkpoint(folder, tag=ENGINE, save_latest=False)
        write_manifest(local, dist.get_rank(), step, origin)
        name = f"step-{step:08}"
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder), checkpoint_dir_name=name)
    dist.barrier()
    if dist.get_rank() == 0:
        for old in _folders(checkpoints)[keep:]:
            shutil.rmtree(old)


def load(engine: Any, checkpoint: Checkpoint) -> None:
    path, _ = engine.load_checkpoint(str(checkpoint.path), tag=ENGINE)
    assert path is not None


def write_manifest(folder: Path, rank: int, step: int, origin: Origin) -> None:
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"step": step, "origin": asdict(origin), "files": files}
    (folder / f"manifest-{rank:05}.json").write_text(json.dumps(manifest, indent=1))


def verify(folder: Path) -> Checkpoint:
    manifests = sorted(folder.glob("manifest-*.json"))
    try:
        contents = [json.loads(path.read_text()) for path in manifests]
    except ValueError:
        raise Damaged("a manifest is cut short") from None
    if not contents or len(contents) != contents[0]["origin"]["workers"]:
        raise Damaged("it was not written to the end")
    for name, expected in (item for content in contents for item in content["files"].items()):
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{name} is missing")
        if path.stat().st_size != expected["size"]:
            raise Damaged(f"{name} has {path.stat().st_size} of {expected['size']} bytes")
        if _sha256(path) != expected["sha256"]:
            raise Damaged(f"{name} has changed since it was written")
    return Checkpoint(folder, contents[0]["step"], Origin(**contents[0]["origin"]))


def newest(checkpoints: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """None if there is none at all; an error if there are some and none is whole."""
    folders = _folders(checkpoints)
    for folder in folders:
        try:
            return verify(folder)
        except Damaged as damage:
            say(f"Checkpoint {folder.name} is damaged ({damage}); looking at the one before it.")
    if folders:
        raise UserError(f"No checkpoint in {checkpoints} is whole.", "Restore the files, or train again (--run).")
    return None


def forget_after(checkpoints: Path, step: int) -> None:
    """Before a run goes on from `step`: what lies beyond it is damaged or abandoned, and its names will be used again.
    So is Ray's own list, which would make Ray fail on a checkpoint that is gone."""
    for folder in _folders(checkpoints):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (checkpoints / RAY_SNAPSHOT).unlink(missing_ok=True)


def _folders(checkpoints: Path) -> list[Path]:
    return sorted(checkpoints.glob("step-*"), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
