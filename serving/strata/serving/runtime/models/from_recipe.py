"""Models of the recipe beside the main one: their folders, checks and start."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from strata.platform import runs
from strata.platform.errors import UserError
from strata.platform.model_families import source
from strata.platform.recipe import ServeSection
from strata.platform.recipe.serve import ServedModelSection
from strata.serving.adapters import recipe as adapter_recipe
from strata.serving.catalogue.store import Store
from strata.serving.runtime.models import checks
from strata.serving.spec import FurtherModel
from strata.serving.speculation import draft

LOOK_S = 0.5


def chosen(section: ServeSection, main: str) -> list[FurtherModel]:
    """Checks the models. Raises UserError."""
    found = []
    needed_gib = 0.0
    taken = {main, *section.models, *(section.adapters.load if section.adapters is not None else ())}
    for name, model in section.models.items():
        if name == main:
            raise UserError(f"serve.models.{name} has the name of the main model.", "Choose another name.")
        own, folder = draft.resolved(section.further(model.changes)), _folder(name, model)
        checks.check_folder(own, folder)
        needed_gib += checks.memory_gib(own, folder) if own.device == "cpu" else 0.0
        adapters = adapter_recipe.entries(own, folder, taken)
        taken |= {entry.name for entry in adapters or ()}
        found.append(FurtherModel(name, str(folder.resolve()), own.model_dump(mode="json", exclude={"models"}), adapters))
    if needed_gib:
        checks.check_memory(needed_gib, "Serving the models of serve.models")
    return found


def _folder(name: str, model: ServedModelSection) -> Path:
    if model.run is not None:
        run = runs.find(model.run)
        if not (run.export / "config.json").is_file():
            raise UserError(f"serve.models.{name}: run '{run.name}' has no export.", f"Write one: strata export {run.name}")
        return run.export
    return source.snapshot(str(model.model)) if source.is_remote(str(model.model)) else Path(str(model.model))


def cpus(models: Sequence[FurtherModel]) -> int:
    """CPUs that the models request from Ray at most."""
    each = {"cpu": 1, "gpu": 2}
    sections = [ServeSection.model_validate(model.section) for model in models]
    return sum((section.prefill.most + section.decode.most) * each[section.device] for section in sections)


def wait(endpoint: str) -> None:
    """Returns when every model serves. Raises UserError if one does not start."""
    while True:
        catalogue = asyncio.run(Store(endpoint).read())
        models = catalogue.models if catalogue is not None else {}
        for name, model in models.items():
            if failed := model.in_state("failed"):
                raise UserError(f"The model '{name}' does not start: {failed[-1].reason}", f"Correct serve.models.{name}.")
        if models and all(model.serving is not None for model in models.values()):
            return
        time.sleep(LOOK_S)
