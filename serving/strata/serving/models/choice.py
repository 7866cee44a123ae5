"""Selects the model and the serve section from the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.model_families import copies, source
from strata.platform.recipe import DataSection, ServeSection
from strata.serving import held_out_chat
from strata.serving.models import model_dir


@dataclass(frozen=True)
class Choice:
    section: ServeSection
    folder: Path
    model_id: str
    words: tuple[str, ...]  # arguments of `strata serve` that select the same model
    knows_python: bool = False  # a run on the default corpus, Python's standard library
    questions: Path | None = None  # held-out conversations beside the data of a run

    @property
    def makes_pictures(self) -> bool:
        return model_dir.makes_pictures(self.folder)


def choose(overrides: Sequence[str], run: str | None, model: Path | str | None, recipe: str | None) -> Choice:
    if run and model:
        raise UserError("--run and --model exclude each other.", "Use one of them.")
    if model:
        section = recipe_file.load(recipe or recipe_file.DEFAULT, overrides).serve
        if source.is_remote(str(model)):
            return Choice(section, source.snapshot(str(model)), copies.name(str(model)), ("--model", str(model), *overrides))
        model = Path(model)
        return Choice(section, model, model.resolve().name, ("--model", str(model), *overrides))
    chosen = runs.find(run) if run else runs.newest_with_export()
    if not any((chosen.export / name).is_file() for name in ("config.json", model_dir.PICTURES)):
        raise UserError(f"Run '{chosen.name}' has no export to serve.", f"Write one: strata export {chosen.name}")
    own = recipe or str(chosen.path / "recipe.yaml")
    words = ("--run", chosen.name, *overrides)
    data = _data_of(chosen)
    knows_python, questions = (not data.all_sets, held_out_chat.find(data)) if data else (False, None)
    return Choice(recipe_file.load(own, overrides).serve, chosen.export, chosen.name, words, knows_python, questions)


def _data_of(run: runs.Run) -> DataSection | None:
    try:
        return run.recipe().data
    except UserError:  # a damaged recipe does not matter here
        return None
