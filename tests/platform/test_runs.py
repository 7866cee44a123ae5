import os
from pathlib import Path

import pytest

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.runs import State


def test_run_stores_its_recipe_and_state() -> None:
    recipe = recipe_file.load("laptop", ["train.steps=7", "train.warmup=1"])
    run = runs.create("mine", recipe, "laptop")
    assert runs.find("mine").recipe() == recipe
    assert (run.state().status, run.state().steps, run.state().pid) == ("running", 7, os.getpid())


def test_unnamed_runs_are_numbered_and_named_ones_are_unique() -> None:
    recipe = recipe_file.load()
    assert [runs.create(None, recipe, "laptop").name for _ in range(3)] == ["laptop-1", "laptop-2", "laptop-3"]
    with pytest.raises(UserError, match=r"exists already[\s\S]*--resume laptop-2"):
        runs.create("laptop-2", recipe, "laptop")


@pytest.mark.parametrize("name", ["../up", "", "a/b", "-x", "x" * 64, "with space"])
def test_bad_names(name: str, own_home: Path) -> None:
    with pytest.raises(UserError, match="is not a valid run name"):
        runs.create(name, recipe_file.load(), "laptop")
    with pytest.raises(UserError, match="There is no run"):
        runs.find(name)
    assert not list(own_home.glob("runs/*"))


def test_unknown_run_suggests_the_nearest() -> None:
    runs.create("baseline", recipe_file.load(), "laptop")
    with pytest.raises(UserError, match="Did you mean 'baseline'"):
        runs.find("basline")


def test_no_exported_run() -> None:
    runs.create("unfinished", recipe_file.load(), "laptop")
    with pytest.raises(UserError, match=r"There is no exported run to serve[\s\S]*make train"):
        runs.newest_with_export()


def test_killed_driver_is_detected() -> None:
    run = runs.create("mine", recipe_file.load(), "laptop")
    assert run.state().observed_status() == "running"
    run.write_state(State("running", pid=2**22 - 1, pid_created=1.0))
    assert run.state().observed_status() == "killed"


def test_damaged_runs_are_listed_and_do_not_affect_others(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from strata.monitoring.top.runs import RunWatch
    from strata.platform.commands import runs as list_runs

    good = runs.create("good", recipe_file.load(), "laptop")
    for name, file, text in (
        ("no-state", "state.json", None),
        ("bad-state", "state.json", "{"),
        ("no-recipe", "recipe.yaml", None),
        ("bad-recipe", "recipe.yaml", "- ["),
        ("bad-id", "run.json", "{}"),
    ):
        run = runs.create(name, recipe_file.load(), "laptop")
        (run.path / file).unlink() if text is None else (run.path / file).write_text(text)
    for run in runs.every():
        run.export.mkdir()
        (run.export / "config.json").touch()
    (own_home / "runs" / "a-file").touch()
    (own_home / "runs" / "empty").mkdir()
    list_runs()
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1] for line in shown.splitlines()[1:7]}
    assert rows == {"good": "running"} | dict.fromkeys(("no-state", "bad-state", "no-recipe", "bad-recipe", "bad-id"), "damaged")
    assert f"no-recipe: {own_home}/runs/no-recipe/recipe.yaml is missing." in shown
    assert {progress.name for progress in RunWatch().poll()} >= {"good"}
    os.utime(good.path / "recipe.yaml", (2**31, 2**31))
    os.utime(own_home / "runs" / "bad-recipe" / "recipe.yaml", (2**31 + 1, 2**31 + 1))
    assert runs.newest_with_export() == good


def test_empty_folder_is_reused_and_a_file_is_not(own_home: Path) -> None:
    (own_home / "runs" / "empty").mkdir(parents=True)
    (own_home / "runs" / "file").touch()
    assert runs.create("empty", recipe_file.load(), "laptop").id()
    with pytest.raises(UserError, match="file exists and is not a run"):
        runs.create("file", recipe_file.load(), "laptop")


def test_second_lock_of_a_run_fails(own_home: Path) -> None:
    run = runs.create("mine", recipe_file.load(), "laptop")
    with run.locked(), pytest.raises(UserError, match="is being trained by another process"), run.locked():
        pass
    with run.locked():
        pass
