import os
from pathlib import Path

import pytest

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.runs import State


def test_a_run_keeps_its_recipe_and_state() -> None:
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
    with pytest.raises(UserError, match="cannot name a run"):
        runs.create(name, recipe_file.load(), "laptop")
    with pytest.raises(UserError, match="There is no run"):
        runs.find(name)
    assert not list(own_home.glob("runs/*"))


def test_unknown_run_suggests_the_nearest() -> None:
    runs.create("baseline", recipe_file.load(), "laptop")
    with pytest.raises(UserError, match="Did you mean 'baseline'"):
        runs.find("basline")


def test_nothing_trained_yet() -> None:
    runs.create("unfinished", recipe_file.load(), "laptop")
    with pytest.raises(UserError, match=r"Nothing is trained yet[\s\S]*make train"):
        runs.newest_with_export()


def test_a_killed_driver_is_seen() -> None:
    run = runs.create("mine", recipe_file.load(), "laptop")
    assert run.state().seen_now() == "running"
    run.say(State("running", pid=2**22 - 1, pid_created=1.0))
    assert run.state().seen_now() == "killed"
