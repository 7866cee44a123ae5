"""Accuracy of pictures in folders: the renderer's are right, those under another's caption are not."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from strata.platform.errors import UserError
from strata.training.data.pictures import write
from strata.training.data.pictures.folder import METADATA
from strata.training.diffusion import judged_folder
from strata.training.diffusion.command import eval_pictures
from strata.training.diffusion.judge import FEATURES


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged") / "shapes"
    write.write(folder, 20, seed=3)
    return folder


def recaptioned(folder: Path, caption: str) -> None:
    rows = [json.loads(line) for line in (folder / METADATA).read_text().splitlines()]
    (folder / METADATA).write_text("".join(json.dumps(row | {"text": caption}) + "\n" for row in rows))


def test_each_folder_has_its_accuracy(made: Path, tmp_path: Path) -> None:
    for name in ("own", "wrong"):
        shutil.copytree(made / "train", tmp_path / name)
    recaptioned(tmp_path / "wrong", "a large red circle on a blue background")
    own, wrong = judged_folder.every(tmp_path)
    assert own[:2] == ("own", 20) and own[2]["all"] == 1.0
    assert wrong[:2] == ("wrong", 20) and wrong[2]["all"] < 0.5


def test_one_folder_is_judged_alone(made: Path) -> None:
    ((name, count, found),) = judged_folder.every(made / "train")
    assert (name, count, found["all"]) == ("train", 20, 1.0)


def test_the_command_prints_a_row_per_folder(made: Path) -> None:
    app = typer.Typer()
    app.command()(eval_pictures)
    answer = CliRunner().invoke(app, [str(made / "train")])
    assert answer.exit_code == 0
    header, row = answer.output.splitlines()
    assert header.split() == ["pictures", "right", *FEATURES]
    assert row.split() == ["train", "20", *["100%"] * (1 + len(FEATURES))]


def test_unusable_folders_are_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no {METADATA}"):
        judged_folder.every(tmp_path)
    write.write(tmp_path / "cats", 4, seed=0)
    recaptioned(tmp_path / "cats" / "train", "a cat on a sofa")
    with pytest.raises(UserError, match="'a cat on a sofa'"):
        judged_folder.every(tmp_path / "cats" / "train")
