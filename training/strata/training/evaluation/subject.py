"""Model that `strata eval` evaluates: the export of a run, a model folder, or an endpoint."""

from dataclasses import dataclass
from pathlib import Path

from strata.platform import runs
from strata.platform.errors import UserError, shown
from strata.platform.runs import Run
from strata.training.checkpoint import model_card

SCHEMES = ("http://", "https://")


@dataclass(frozen=True)
class Subject:
    """`folder` or `url` is set. A run also has its own fields; its `step` is that of the exported checkpoint, if known."""

    name: str
    folder: Path | None = None
    url: str | None = None
    run: Run | None = None
    step: int | None = None


def resolve(name: str) -> Subject:
    """Subject of an address, a run's name or a folder, in this order. A name with a slash in it is never a run's."""
    if name.startswith(SCHEMES):
        url = name.rstrip("/").removesuffix("/v1")
        return Subject(url, url=url)
    if runs.exists(name):
        run = runs.find(name)
        if not run.has_export():
            fix = f"Export its newest checkpoint: strata export {name}. Or finish it: strata train --resume {name}"
            raise UserError(f"Run '{name}' has no export to evaluate.", fix)
        origin = model_card.origin_of(run.export)
        return Subject(name, folder=run.export, run=run, step=origin.step if origin else None)
    folder = Path(name)
    if _is_dir(folder):
        if not (folder / "config.json").is_file():
            raise UserError(f"{shown(folder, 200)} is not a model folder: it has no config.json.", "Name a Hugging Face folder.")
        return Subject(folder.resolve().name, folder=folder)
    if "/" in name:
        raise UserError(f"There is no folder {shown(name, 200)}.", "Name a run, a model folder, or an address (http://...).")
    return Subject(name, run=runs.find(name))  # raises, with the nearest name


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False
