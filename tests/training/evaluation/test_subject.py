"""Subjects of an evaluation."""

from pathlib import Path

import pytest

from strata.platform import runs
from strata.platform.errors import UserError
from strata.platform.runs import Run
from strata.training.evaluation.subject import Subject, resolve

from .conftest import RECIPE


@pytest.mark.parametrize(
    "given", ["http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"]
)
def test_address_of_an_endpoint(given: str, home: Path) -> None:
    assert resolve(given) == Subject("http://127.0.0.1:8000", url="http://127.0.0.1:8000")


def test_run_has_its_export_and_the_exported_step(run: Run) -> None:
    assert resolve("r") == Subject("r", folder=run.export, run=run, step=5)
    (run.export / "README.md").unlink()
    assert resolve("r").step is None


def test_run_wins_over_a_folder_of_its_name(
    run: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "beside")
    Path("r").symlink_to(model_folder)
    assert resolve("r").run == run
    assert resolve("./r") == Subject(model_folder.name, folder=Path("r"))


def test_run_without_an_export(home: Path) -> None:
    runs.create("fresh", RECIPE, "fresh")
    with pytest.raises(UserError) as caught:
        resolve("fresh")
    assert "Run 'fresh' has no export" in caught.value.cause and "strata export fresh" in caught.value.fix


def test_unknown_names(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        resolve("rr")
    assert caught.value.cause == "There is no run 'rr'."
    with pytest.raises(UserError, match="There is no folder"):
        resolve(str(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve(str(tmp_path))
    with pytest.raises(UserError):
        resolve("x" * 5000)
    with pytest.raises(UserError):
        resolve("")
