"""Imports of a worker, in the server process from which workers are forked: an import takes seconds, a fork none.

diffusers and transformers import a class when it is first used, so the classes that the model's folder names are used here. A
preloaded module has no arguments; the folder is in the environment.
"""

import importlib
import json
import os
from pathlib import Path

from strata.serving.diffusion.replica import worker  # noqa: F401
from strata.serving.diffusion.replica.worker_group import FOLDER

LIBRARIES = ("diffusers", "transformers")


def import_classes(folder: Path) -> list[str]:
    """Imports the classes in model_index.json, and returns the names of those that exist. The worker reports a bad folder."""
    try:
        index = json.loads((folder / "model_index.json").read_text())
    except (OSError, ValueError):
        return []
    if not isinstance(index, dict):
        return []
    named = [entry for entry in index.values() if isinstance(entry, list) and len(entry) == 2]
    named += [["diffusers", index.get("_class_name")]]
    return [
        name
        for library, name in named
        if library in LIBRARIES and isinstance(name, str) and getattr(importlib.import_module(library), name, None) is not None
    ]


if FOLDER in os.environ:
    import_classes(Path(os.environ[FOLDER]))
