"""Subject of a serving benchmark: one model folder and one recipe's serve section, the same for all contenders."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.platform.recipe import ServeSection
from strata.serving.models import choice, model_dir


@dataclass(frozen=True)
class Subject:
    folder: Path
    model_id: str
    section: ServeSection
    words: tuple[str, ...]  # arguments with which `strata serve` chooses the same
    vocab: int
    context: int
    sharing: int = 1  # contenders that are up concurrently, each with its part of the memory


def choose(overrides: Sequence[str], run: str | None, model: Path | None, recipe: str | None) -> Subject:
    chosen = choice.choose(overrides, run, model, recipe)
    model_dir.check(chosen.folder)
    config = json.loads((chosen.folder / "config.json").read_text())
    words = chosen.words if recipe is None or "--recipe" in chosen.words else (*chosen.words, "--recipe", recipe)
    return Subject(
        chosen.folder.resolve(),
        chosen.model_id,
        chosen.section,
        words,
        int(config["vocab_size"]),
        int(config["max_position_embeddings"]),
    )
