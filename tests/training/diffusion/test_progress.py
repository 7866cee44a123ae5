"""Grids of pictures: layout, names, the newest, and those of a resumed run."""

import io
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from strata.platform.errors import UserError
from strata.platform.runs import Run
from strata.training.data.generated.command import data_make
from strata.training.data.pictures import folder as folders
from strata.training.data.pictures.write import GAP, GRID, grid_png
from strata.training.diffusion import progress


def filled(value: int) -> np.ndarray:
    return np.full((4, 6, 3), value, np.uint8)


def test_pictures_lie_in_rows() -> None:
    grid = np.asarray(Image.open(io.BytesIO(grid_png([filled(value) for value in (10, 20, 30, 40, 50)], scale=2))))
    assert grid.shape == (2 * (2 * 4 + 3 * GAP), 2 * (3 * 6 + 4 * GAP), 3)

    def at(row: int, column: int) -> int:
        return int(grid[2 * (GAP + row * (4 + GAP)), 2 * (GAP + column * (6 + GAP)), 0])

    assert [at(0, 0), at(0, 1), at(0, 2), at(1, 0), at(1, 1)] == [10, 20, 30, 40, 50]
    assert at(1, 2) == grid[0, 0, 0] == 128, "free places and gaps are grey"


def test_grids_of_a_run(tmp_path: Path) -> None:
    run, grids = Run(tmp_path), progress.Grids(Run(tmp_path))
    assert progress.newest(run) is None
    for step in (5, 100, 20):
        assert grids.write(step, [filled(step)]) == f"step-{step:06}.png"
    assert progress.newest(run) == tmp_path / "samples" / "step-000100.png"
    progress.cut(run, 20)
    assert sorted(path.name for path in progress.folder(run).iterdir()) == ["step-000005.png", "step-000020.png"]
    assert grids.problem is None


def test_a_failed_write_is_a_problem_until_the_next(tmp_path: Path) -> None:
    grids = progress.Grids(Run(tmp_path))
    (tmp_path / "samples").write_text("not a folder")
    assert grids.write(1, [filled(1)]) is None and isinstance(grids.problem, OSError)
    (tmp_path / "samples").unlink()
    assert grids.write(2, [filled(1)]) and grids.problem is None


def test_the_command_writes_a_folder_to_train_on(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(data_make)
    to = tmp_path / "pictures"
    answer = CliRunner().invoke(app, ["pictures", "--to", str(to), "--count", "40"])
    assert answer.exit_code == 0 and str(to / GRID) in answer.output.replace("\n", "")
    train, held_out = folders.find(to / "train", "text"), folders.find(to / "held-out", "text")
    assert (len(train), len(held_out)) == (40, 2)
    assert not {one.caption for one in train} & {one.caption for one in held_out}
    assert folders.read(train[0].picture, 32).shape == (32, 32, 3)
    with pytest.raises(UserError, match="already"):
        data_make("pictures", to, 4, 0)
