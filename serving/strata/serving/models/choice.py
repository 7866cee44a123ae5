"""Selects the model and the serve section from the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.recipe import ServeSection


@dataclass(frozen=True)
class Choice:
    section: ServeSection
    folder: Path
    model_id: str
    words: tuple[str, ...]  # arguments of `strata serve` that select the same model
    knows_python: bool = False  # a run on the default corpus, Python's standard library


def choose(overrides: Sequence[str], run: str | None, model: Path | None, recipe: str | None) -> Choice:
    if run and model:
        raise UserError("--run and --model exclude each other.", "Use one of them.")
    if model:
        section = recipe_file.load(recipe or recipe_file.DEFAULT, overrides).serve
        return Choice(section, model, model.resolve().name, ("--model", str(model), *overrides))
    chosen = runs.find(run) if run else runs.newest_with_export()
    if not (chosen.export / "config.json").is_file():
        raise UserError(f"Run '{chosen.name}' has no export to serve.", f"Write one: strata export {chosen.name}")
    source = recipe or str(chosen.path / "recipe.yaml")
    words = ("--run", chosen.name, *overrides)
    return Choice(recipe_file.load(source, overrides).serve, chosen.export, chosen.name, words, _knows_python(chosen))


def _knows_python(run: runs.Run) -> bool:
    try:
        data = run.recipe().data
    except UserError:  # a damaged recipe does not matter here
        return False
    return data.path is None and data.hf is None
