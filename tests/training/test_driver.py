"""Runs that are refused before any worker starts leave nothing behind."""

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.platform.runs import State
from strata.training import driver
from strata.training.checkpoint import format
from strata.training.checkpoint.format import Origin
from strata.training.checkpoint.storage import folder
from strata.training.commands import export, train


def start(recipe: Recipe, name: str = "new") -> driver.Summary:
    return driver.start(recipe, name, "test", Console(quiet=True))


def changed(recipe: Recipe, section: str, **values: object) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("data", {"path": Path("/nowhere")}, r"data.path=/nowhere does not exist"),
        ("data", {"path": Path("empty")}, r"has no text"),
        ("model", {"context": 100_000}, r"The corpus is too small: \d+ tokens"),
        ("parallel", {"pipeline": 2, "zero": 3}, r"A pipeline .* not with parallel.zero=3"),
        ("model", {"layers": 1000, "hidden": 8192}, r"Training needs about \d+.\d GiB"),
    ],
)
def test_refused_run_leaves_no_folder(
    home: Path, small_recipe: Recipe, section: str, values: dict[str, object], message: str
) -> None:
    (home / "empty").mkdir()
    if values.get("path") == Path("empty"):
        values = {"path": home / "empty"}
    with pytest.raises(UserError, match=message):
        start(changed(small_recipe, section, **values))
    assert runs.every() == [] and not (home / "runs" / "new").exists()


def test_duplicate_run_name_is_refused(home: Path, small_recipe: Recipe) -> None:
    first = runs.create("mine", small_recipe, "test")
    with pytest.raises(UserError, match="A run named 'mine' exists already"):
        start(small_recipe, "mine")
    assert first.state().status == "running"


@pytest.mark.parametrize("command", [lambda: train(resume="nope"), lambda: export("nope")])
def test_unknown_run_is_refused(home: Path, command: object) -> None:
    with pytest.raises(UserError, match="There is no run 'nope'"):
        command()  # type: ignore[operator]


def test_run_without_a_checkpoint_cannot_be_exported(home: Path, small_recipe: Recipe) -> None:
    runs.create("fresh", small_recipe, "test")
    with pytest.raises(UserError, match="Run 'fresh' has no checkpoint to export"):
        export("fresh")
    assert not runs.find("fresh").export.exists()


def test_run_with_a_living_driver_is_not_resumed(home: Path, small_recipe: Recipe) -> None:
    run = runs.create("busy", small_recipe, "test")
    with pytest.raises(UserError, match=f"is being trained by process {os.getpid()}"):
        driver.resume(run, small_recipe, Console(quiet=True))


def test_resume_and_run_exclude_each_other(home: Path) -> None:
    with pytest.raises(UserError, match="Use one of them"):
        train(run="a", resume="b")


@pytest.mark.parametrize(
    ("then", "message"),
    [
        ({"model": {"layers": 99}}, "model.layers was 99"),
        ({"tokens": "others"}, "The corpus is not the one the run began with"),
        ({"batch": 16}, "Resume with train.batch=16"),
        ({"seed": 7}, "train.seed was 7"),
    ],
)
def test_incompatible_checkpoint_is_refused_and_the_run_unchanged(
    home: Path, small_recipe: Recipe, tokens: Path, then: dict[str, object], message: str
) -> None:
    recipe = changed(small_recipe, "data", holdout=0.1)
    run = runs.create("old", recipe, "test")
    run.write_state(State("finished", 4, 4))
    origin = Origin(recipe.model.model_dump(), tokens.name, recipe.train.batch, recipe.train.seed)
    if "model" in then:
        then = {"model": origin.model | then["model"]}  # type: ignore[operator]
    origin = replace(origin, **then)  # type: ignore[arg-type]
    saved = run.checkpoints / "step-00000004"
    format.write(folder(saved), 0, 1, 4, origin, None, [])
    with pytest.raises(UserError) as raised:
        driver.resume(run, recipe, Console(quiet=True))
    assert message in str(raised.value)
    assert run.state() == State("finished", 4, 4) and saved.exists()


def test_checkpoint_from_before_a_key_of_the_model_existed_is_the_same(small_recipe: Recipe) -> None:
    model = small_recipe.model.model_dump(mode="json")
    now = Origin(model, "t", 4, 0)
    old = {key: value for key, value in model.items() if key not in ("architecture", "from", "family")}
    driver._require_same(replace(now, model=old), now)
    with pytest.raises(UserError, match=r"model\.layers was 99"):
        driver._require_same(replace(now, model=old | {"layers": 99}), now)


def test_command_line_makes_the_data_path_absolute(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Recipe] = []
    monkeypatch.chdir(home)
    monkeypatch.setattr(driver, "start", lambda recipe, *_: seen.append(recipe) or (_ for _ in ()).throw(UserError("stop", "")))
    with pytest.raises(UserError, match="stop"):
        train(["data.path=texts"])
    assert seen[0].data.path == home / "texts"
    assert recipe_file.load("laptop").data.path is None


def test_paths_of_fine_tuning_are_absolute_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Recipe] = []
    monkeypatch.chdir(home)
    monkeypatch.setattr(driver, "start", lambda recipe, *_: seen.append(recipe) or (_ for _ in ()).throw(UserError("stop", "")))
    words = ["data.sets=[{path: a, kind: chat}, {uri: 's3://b/c', kind: chat}]", "data.chat_template=t.jinja"]
    with pytest.raises(UserError, match="stop"):
        train([*words, "train.lora={from: adapter}"])
    data, lora = seen[0].data, seen[0].train.lora
    assert [one.path for one in data.sets] == [home / "a", None] and data.chat_template == home / "t.jinja"
    assert lora is not None and lora.source == str(home / "adapter")


def test_run_of_a_dead_driver_is_shown_as_killed(home: Path, small_recipe: Recipe) -> None:
    run = runs.create("dead", small_recipe, "test")
    run.write_state(replace(run.state(), pid_created=psutil.boot_time() - 1000))
    assert run.state().observed_status() == "killed"
