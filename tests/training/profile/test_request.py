"""Requests for a profile: parsing, the file in a run's folder, and running runs."""

from pathlib import Path

import pytest

from strata.platform import runs
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.platform.runs import State
from strata.training.metrics import records
from strata.training.profile import attach, request
from strata.training.profile.request import Request


def test_steps_and_ranks_are_parsed() -> None:
    assert request.parse_steps("10..14") == (10, 14) and request.parse_steps("7") == (7, 7)
    assert request.parse_ranks("all", 4) == () and request.parse_ranks("2,0", 4) == (0, 2)


@pytest.mark.parametrize("text", ["", "1..3", "5..4", "a..b", "-3", "3..", "2...5"])
def test_other_steps_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="no range of steps"):
        request.parse_steps(text)


@pytest.mark.parametrize("text", ["", "4", "0,x", "-1"])
def test_other_ranks_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="4 workers do not have"):
        request.parse_ranks(text, 4)


def test_a_damaged_request_is_none(tmp_path: Path) -> None:
    assert request.read(tmp_path) is None
    wanted = Request("a", 3, 5, (1,))
    request.write(tmp_path, wanted)
    assert request.read(tmp_path) == wanted and wanted.includes(1) and not wanted.includes(0)
    (tmp_path / request.FOLDER / request.FILE).write_text('{"id": 3')
    assert request.read(tmp_path) is None


def test_only_a_running_run_is_profiled(home: Path, small_recipe: Recipe) -> None:
    run = runs.create("stopped", small_recipe, "run")
    run.write_state(State("interrupted", 5, 8))
    with pytest.raises(UserError, match="is interrupted"):
        attach.ask(run, small_recipe, 2, ())


def test_a_profile_begins_when_all_ranks_can_know_of_it(home: Path, small_recipe: Recipe) -> None:
    recipe = small_recipe.model_copy(update={"train": small_recipe.train.model_copy(update={"steps": 1000})})
    run = runs.create("running", recipe, "run")
    run.write_running(State("running", 40, 1000))
    records.append(run.metrics, *({"step": step, "loss": 1.0, "time": 100 + step * 0.125} for step in range(1, 41)))
    wanted = attach.ask(run, recipe, 5, ())
    assert (wanted.first, wanted.last) == (66, 70), "40 + 2 steps, and 24 steps of an eighth of a second"
    assert request.read(run.path) == wanted
    with pytest.raises(UserError, match="too few steps left"):
        attach.ask(run, recipe, 960, ())
    with pytest.raises(UserError, match=r"wrote no profile within 0.3 s; ranks 0, 1 are missing"):
        attach.wait(run, recipe, wanted, 0.3, lambda text: None)
    run.write_state(State("failed", 50, 1000))
    with pytest.raises(UserError, match="ended"):
        attach.wait(run, recipe, wanted, 30, lambda text: None)
