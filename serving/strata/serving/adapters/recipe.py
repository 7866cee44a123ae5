"""Adapters of a recipe: where they may be, and those that are loaded from the start."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from strata.platform import runs
from strata.platform.errors import UserError, shown
from strata.platform.recipe import ServeSection
from strata.serving.adapters import folder
from strata.serving.adapters.entry import NAME, Entry
from strata.serving.adapters.folder import Rule


@dataclass(frozen=True)
class AdapterSpec:
    """Adapters of an engine."""

    slots: int  # in one step
    in_memory: int
    rule: Rule


def spec(serve: ServeSection, model_dir: Path) -> AdapterSpec | None:
    section = serve.adapters
    if section is None:
        return None
    roots = (str(runs.runs_dir()), *(str(Path(root).resolve()) for root in section.roots))
    return AdapterSpec(
        section.slots, section.in_memory, Rule(str(model_dir.resolve()), section.rank, roots, serve.device == "cpu")
    )


def entries(serve: ServeSection, model_dir: Path, models: Collection[str]) -> tuple[Entry, ...] | None:
    """Adapters from the start, None for an endpoint without adapters. Raises UserError."""
    if serve.adapters is None:
        return None
    found = spec(serve, model_dir)
    assert found is not None
    rule = Rule(found.rule.base, found.rule.rank, ("/",), found.rule.on_cpu)  # the recipe may name any folder
    listed = []
    for name, given in serve.adapters.load.items():
        if not NAME.fullmatch(name):
            raise UserError(f"serve.adapters.load: {shown(name)} is no name of an adapter.", "Use letters, digits and . _ : / -.")
        if name in models:
            raise UserError(f"serve.adapters.load: '{name}' is the name of a model or of another adapter.", "Use another name.")
        one = folder.inspect(str(Path(given).resolve()), rule)
        listed.append(Entry(name, one.folder, one.revision, one.rank))
    return tuple(listed)
