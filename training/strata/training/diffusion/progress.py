"""Pictures of fixed captions while a run trains: `samples/step-000500.png` in the run's folder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.platform.files import write_atomic
from strata.platform.runs import Run
from strata.training.data.pictures.write import grid_png
from strata.training.data.sampler import Indices

NAME = re.compile(r"step-(\d+)\.png")
SCALE = 4  # pixels of a grid for each pixel of a picture


@dataclass(frozen=True)
class PicturePrompts:
    """Captions that a run draws at every evaluation, and their token ids; `empty` is the empty caption."""

    captions: tuple[str, ...]
    tokens: Indices
    empty: Indices


def folder(run: Run) -> Path:
    return run.path / "samples"


def newest(run: Run) -> Path | None:
    """Grid of the last step that has one."""
    return max(_grids(run), default=None)


def cut(run: Run, step: int) -> None:
    """Removes grids after `step`, for a run that resumes there."""
    for path in _grids(run):
        if _step(path) > step:
            path.unlink(missing_ok=True)


def _grids(run: Run) -> list[Path]:
    return [path for path in folder(run).glob("step-*.png") if NAME.fullmatch(path.name)]


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1])


class Grids:
    """Writes grids. A failed write does not raise, since that would end this rank alone; `problem` has the reason."""

    def __init__(self, run: Run) -> None:
        self._folder = folder(run)
        self.problem: OSError | None = None

    def write(self, step: int, pictures: Sequence[NDArray[np.uint8]]) -> str | None:
        """Writes the grid of a step and returns its name, None for a failed write."""
        path = self._folder / f"step-{step:06}.png"
        try:
            write_atomic(path, grid_png(pictures, SCALE))
        except OSError as error:
            self.problem = error
            return None
        self.problem = None
        return path.name
