"""`--or-resume`: a retried job resumes its run, and respects runs of live drivers."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.platform.runs import Run, State
from strata.training import driver
from strata.training.commands import train


class Resumed(Exception):
    """Raised in place of training."""


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Recipes with which runs would have been resumed."""
    seen: list[Recipe] = []

    def prepare(run: Run, recipe: Recipe, console: Console) -> None:
        seen.append(recipe)
        raise Resumed

    monkeypatch.setattr(driver, "prepare", prepare)
    return seen


def as_of(run: Run, status: str, **more: object) -> Run:
    run.write_state(replace(run.state(), status=status, **more))  # type: ignore[arg-type]
    return run


def exported(run: Run) -> Run:
    run.export.mkdir()
    (run.export / "config.json").touch()
    return run


def retry(recipe: Recipe, name: str = "job") -> driver.Summary | None:
    return driver.start_or_resume(recipe, name, "test", Console(highlight=False, soft_wrap=True))


def test_missing_run_is_started(home: Path, small_recipe: Recipe, resumed: list[Recipe]) -> None:
    with pytest.raises(Resumed):
        retry(small_recipe)
    assert resumed == [small_recipe]


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_interrupted_or_failed_run_is_resumed(home: Path, small_recipe: Recipe, resumed: list[Recipe], status: str) -> None:
    as_of(runs.create("job", small_recipe, "test"), status)
    with pytest.raises(Resumed):
        retry(small_recipe)


def test_finished_run_is_unchanged_and_the_command_succeeds(
    home: Path, small_recipe: Recipe, resumed: list[Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported(as_of(runs.create("job", small_recipe, "test"), "finished", step=8))
    before = run.state()
    train(recipe=str(run.path / "recipe.yaml"), run="job", or_resume=True)
    train(["serve.port=9000"], recipe=str(run.path / "recipe.yaml"), run="job", or_resume=True)
    assert capsys.readouterr().out.count("Run 'job' is finished already; serve it with: strata serve --run job") == 2
    assert not resumed and run.state() == before


def test_finished_run_without_an_export_is_exported(home: Path, small_recipe: Recipe, resumed: list[Recipe]) -> None:
    as_of(runs.create("job", small_recipe, "test"), "finished")
    with pytest.raises(Resumed):
        retry(small_recipe)


def test_given_recipe_is_used_and_its_changes_are_printed(
    home: Path, small_recipe: Recipe, resumed: list[Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported(as_of(runs.create("job", small_recipe, "test"), "finished", step=8))
    with pytest.raises(Resumed):
        train(["train.steps=16", "train.keep=5"], recipe=str(run.path / "recipe.yaml"), run="job", or_resume=True)
    assert "Run 'job' exists; its recipe changes in train.steps, train.keep." in capsys.readouterr().out
    assert resumed[0].train.steps == 16


def test_run_of_a_live_local_driver_is_refused(home: Path, small_recipe: Recipe, resumed: list[Recipe]) -> None:
    runs.create("job", small_recipe, "test")
    with pytest.raises(UserError, match="is being trained by process"):
        retry(small_recipe)


def test_only_a_retried_job_takes_over_a_run_of_another_machine(
    home: Path, small_recipe: Recipe, resumed: list[Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    run = as_of(runs.create("job", small_recipe, "test"), "running", host="lost-pod")
    with pytest.raises(UserError) as refused:
        driver.resume(run, small_recipe, Console(quiet=True))
    assert "is being trained on lost-pod" in refused.value.cause
    assert f"--recipe {run.path}/recipe.yaml --run job --or-resume" in refused.value.fix
    with pytest.raises(Resumed):
        retry(small_recipe)
    assert "Run 'job' was last trained on lost-pod; it continues here." in capsys.readouterr().out


def test_state_contains_the_host(home: Path, small_recipe: Recipe) -> None:
    run = runs.create("job", small_recipe, "test")
    assert run.state().observed_status() == "running" and not run.state().elsewhere()
    moved = as_of(run, "running", host="other").state()
    assert moved.elsewhere() and moved.observed_status() == "running on other"
    assert not replace(moved, status="finished").elsewhere()


def test_state_without_a_host_is_read(home: Path, small_recipe: Recipe) -> None:
    run = runs.create("job", small_recipe, "test")
    old = {key: value for key, value in asdict(run.state()).items() if key != "host"}
    (run.path / "state.json").write_text(json.dumps(old))
    assert run.state() == State(**old) and run.state().observed_status() == "running"


@pytest.mark.parametrize(("arguments", "fix"), [({}, "Name it with --run"), ({"resume": "a"}, "Use one of them")])
def test_or_resume_requires_a_run_name(home: Path, arguments: dict[str, str], fix: str) -> None:
    with pytest.raises(UserError) as refused:
        train(or_resume=True, **arguments)  # type: ignore[arg-type]
    assert fix in refused.value.fix


def test_rayjob_entrypoint_is_a_valid_command(root: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the job's command with another path for the recipe."""
    import yaml
    from typer.testing import CliRunner

    from strata.platform.cli import build

    entrypoint = yaml.safe_load((root / "infra/base/train/rayjob.yaml").read_text())["spec"]["entrypoint"].split()
    seen: list[str] = []
    monkeypatch.setattr(driver, "start_or_resume", lambda recipe, name, *_: seen.append(name))
    place = entrypoint.index("--recipe") + 1
    recipe = home / "recipe.yaml"
    recipe.write_text(recipe_file.dump(recipe_file.load("laptop")))
    result = CliRunner().invoke(build(), [*entrypoint[1:place], str(recipe), *entrypoint[place + 1 :]])
    assert (result.exit_code, seen) == (0, ["demo"]), result.output
