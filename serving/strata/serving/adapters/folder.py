"""Checks of an adapter's folder, before an engine reads it. Refuses what vLLM would compute otherwise than peft."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.platform.errors import UserError, shown
from strata.serving.models import adapter, model_dir
from strata.serving.models.adapter import CONFIG, WEIGHTS

REVISION_DIGITS = 16
PREFIX = "base_model.model."  # of peft's tensor names
FIX = "Train or export the adapter for the served model."


@dataclass(frozen=True)
class Found:
    folder: str
    revision: str
    rank: int


@dataclass(frozen=True)
class Rule:
    """Adapters that may be loaded."""

    base: str  # folder of the served model
    rank: int  # largest
    roots: tuple[str, ...]  # folders below which adapters may be
    on_cpu: bool


def inspect(given: str, rule: Rule) -> Found:
    """Raises UserError for a folder that may not be loaded."""
    folder = _within(given, rule.roots)
    if not folder.is_dir():
        raise UserError(f"There is no folder {given}.", "Write the path of a folder with an adapter in peft's format.")
    config = adapter.read_config(folder / CONFIG, FIX)
    rank = adapter.check_config(folder / CONFIG, config, FIX)
    if rank > rule.rank:
        fix = "Start the endpoint with a larger serve.adapters.rank."
        raise UserError(f"{given} has rank {rank}, and this endpoint has memory for rank {rule.rank}.", fix)
    base = Path(rule.base)
    _check_base(config.get("base_model_name_or_path"), base, given)
    if rule.on_cpu:
        adapter.check_no_experts(base, FIX)
    check_weights(folder, base, rank)
    return Found(str(folder), revision(folder), rank)


def check_weights(folder: Path, base: Path, rank: int) -> None:
    """Raises UserError if the adapter does not fit the weights in `base`."""
    model_dir.check_safetensors(folder / WEIGHTS)
    _check_shapes(folder / WEIGHTS, base, rank)


def revision(folder: Path) -> str:
    """Digest of the content. Raises UserError."""
    digest = hashlib.sha256()
    try:
        digest.update((folder / CONFIG).read_bytes())
        with (folder / WEIGHTS).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}.", "Restore the folder.") from None
    return digest.hexdigest()[:REVISION_DIGITS]


def _within(given: str, roots: Sequence[str]) -> Path:
    """The folder without links. The refusal of others does not depend on what is there."""
    path = Path(given)
    resolved = path.resolve() if path.is_absolute() and "\0" not in given else None
    if resolved is None or not any(resolved.is_relative_to(Path(root).resolve()) for root in roots):
        allowed = ", ".join(roots)
        fix = "Write an absolute path below one of them, or add its parent to serve.adapters.roots in the recipe."
        raise UserError(f"{shown(given, 200)} is not below a folder with adapters ({allowed}).", fix)
    return resolved


def _check_base(named: object, base: Path, given: str) -> None:
    """A base that exists here under another path is another model. One that does not is compared by its shapes only."""
    if isinstance(named, str) and named and Path(named).is_dir() and not Path(named).samefile(base):
        raise UserError(f"{given} was trained on {named}, and {base} is served.", FIX)


def _check_shapes(weights: Path, base: Path, rank: int) -> None:
    """Compares the adapter's matrices with those of the base model, by the headers of both."""
    shapes = _shapes(base.glob("*.safetensors"))
    own = _shapes([weights])
    if not own:
        raise UserError(f"{weights} has no tensors.", "Export or copy it again.")
    fitting = 0
    for name, shape in own.items():
        path, _, part = name.removeprefix(PREFIX).rpartition(".lora_")
        side = part.removesuffix(".weight")
        if side not in ("A", "B"):
            raise UserError(f"{weights} has {shown(name, 120)}, which is no LoRA matrix of a projection.", FIX)
        target = shapes.get(f"{path}.weight")
        if target is None or len(target) != 2:
            continue  # some models store several projections in one tensor; vLLM knows them
        expected = [rank, target[1]] if side == "A" else [target[0], rank]
        if shape != expected:
            raise UserError(f"{weights}: {shown(name, 120)} is {shape}, and the served model needs {expected}.", FIX)
        fitting += 1
    if not fitting:
        raise UserError(f"{weights} has no matrix of a projection of the served model.", FIX)


def _shapes(files: Iterable[Path]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        found |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return found
