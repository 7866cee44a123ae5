"""Refusals of a teacher before workers start, and of another teacher in a resumed run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from strata.planner.recipes import planned_peak
from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.preparation import prepare

from ..conftest import SMALL, VOCAB, write_corpus
from .teachers import SECTION, write_teacher


@pytest.fixture(scope="module")
def teacher(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = recipe_file.load("laptop", [*SMALL, f"data.path={corpus}"])
    folder = tmp_path_factory.mktemp("teacher")
    tokens = shards.prepare(open_corpus(recipe.data), VOCAB, recipe.data.holdout)
    return write_teacher(folder / "model", tokens)


@pytest.fixture
def own(teacher: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(teacher, tmp_path / "teacher"))


def recipe_of(corpus: Path, teacher: Path | str, *more: str) -> Recipe:
    return recipe_file.load("laptop", [*SMALL, f"data.path={corpus}", f"train.distill={teacher}", *more])


def prepared(recipe: Recipe, name: str = "draft") -> None:
    run = runs.find(name) if runs.exists(name) else runs.create(name, recipe, "laptop")
    prepare(run, recipe, Console(quiet=True))


def refusal(recipe: Recipe) -> str:
    with pytest.raises(UserError) as raised:
        prepared(recipe)
    return f"{raised.value.cause} {raised.value.fix}"


def test_the_recipe_records_an_absolute_path(corpus: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    recipe = recipe_of(corpus, own.name)
    assert recipe.train.distill == str(own)
    prepared(recipe)
    shutil.rmtree(own)
    assert runs.find("draft").recipe() == recipe, "a run's own recipe needs no teacher"


def test_a_run_is_found_by_its_name(corpus: Path, teacher: Path, home: Path) -> None:
    run = runs.create("large", recipe_file.load("laptop", [*SMALL, f"data.path={corpus}"]), "laptop")
    with pytest.raises(UserError, match=r"train\.distill=large is a run without an export") as raised:
        recipe_of(corpus, "large")
    assert raised.value.fix == "Write it: strata export large"
    shutil.copytree(teacher, run.export)
    assert recipe_of(corpus, "large").train.distill == str(run.export)
    with pytest.raises(UserError, match=r"train\.distill=lerge is neither a folder nor a run"):
        recipe_of(corpus, "lerge")


def test_a_fitting_teacher_is_accepted_twice(corpus: Path, own: Path) -> None:
    recipe = recipe_of(corpus, own)
    prepared(recipe)
    prepared(recipe)


def test_a_resumed_run_refuses_another_teacher(corpus: Path, own: Path, teacher: Path) -> None:
    prepared(recipe_of(corpus, own))
    prepared(recipe_of(corpus, teacher))  # a copy
    weights = own / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "are not those that run 'draft' began with, and its steps so far followed those." in refusal(recipe_of(corpus, own))


def test_a_resumed_run_refuses_to_go_on_without_its_teacher(corpus: Path, own: Path) -> None:
    recipe = recipe_of(corpus, own)
    prepared(recipe)
    assert "train.distill is unset now. Restore train.distill" in refusal(recipe_file.change(recipe, ["train.distill=null"]))


def _edit(own: Path, **values: object) -> None:
    path = own / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda own: shutil.rmtree(own), "train.distill={own} is neither a folder nor a run."),
        (lambda own: (own / "config.json").unlink(), "{own} has no config.json."),
        (lambda own: (own / "model.safetensors").unlink(), "{own}"),
        (lambda own: (own / "tokenizer.json").unlink(), "{own}/tokenizer.json is missing"),
        (lambda own: (own / "tokenizer.json").write_text("{"), "{own}/tokenizer.json is damaged"),
        (lambda own: (own / "tokenizer.json").write_text("[]"), "{own}/tokenizer.json is damaged"),
        (lambda own: _edit(own, max_position_embeddings=31), "model.context=32 exceeds max_position_embeddings=31"),
        (lambda own: _edit(own, vocab_size=600), "has 600 tokens, and the model has 512 (model.vocab). Set model.vocab=600."),
        (lambda own: _edit(own, num_hidden_layers=4), "lacks the tensor"),
        (lambda own: _edit(own, architectures=["MambaForCausalLM"]), "MambaForCausalLM, which is not supported"),
    ],
)
def test_a_damaged_or_unfit_teacher_is_refused(damage: Callable[[Path], object], message: str, corpus: Path, own: Path) -> None:
    recipe = recipe_of(corpus, own)
    damage(own)
    assert message.format(own=own) in refusal(recipe)


def test_another_tokenizer_is_refused(own: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write_corpus(tmp_path / "other")
    (other / "more.txt").write_text("quite different words: zebra quagga xylophone " * 200)
    found = refusal(recipe_of(other, own))
    assert "differs from that of this run's data. Set data as in the teacher's own recipe." in found


def test_one_changed_merge_is_refused(corpus: Path, own: Path) -> None:
    path = own / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["merges"][:2] = reversed(values["model"]["merges"][:2])
    path.write_text(json.dumps(values))
    assert "differs from that of this run's data" in refusal(recipe_of(corpus, own))


def test_the_plan_counts_the_teachers_weights(corpus: Path, own: Path) -> None:
    without = recipe_file.load("laptop", [*SMALL, f"data.path={corpus}"])
    layer = 2 * 48 * 48 + 2 * 48 * 24 + 3 * 48 * 80 + 2 * 48
    parameters = SECTION.layers * layer + 512 * 48 + 48
    assert planned_peak(recipe_of(corpus, own)) - planned_peak(without) == pytest.approx(4 * parameters)
    half = ("train.precision=bf16", "parallel.zero=1")
    added = planned_peak(recipe_of(corpus, own, *half)) - planned_peak(recipe_file.change(without, half))
    assert added == pytest.approx(2 * parameters)
