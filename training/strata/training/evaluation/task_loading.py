"""Tasks of the harness by name or YAML file, with errors that name the cause."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

from strata.platform.errors import UserError, shown

OWN = Path(__file__).parent / "tasks"
OFFLINE = "python_lines"  # needs no network
NEAREST = 3


def load(names: Sequence[str], include: Sequence[Path]) -> dict[str, Any]:
    """Tasks and groups as the harness's `evaluate` takes them. `include` are folders with YAML files of tasks."""
    for folder in include:
        if not folder.is_dir():
            raise UserError(f"--include {shown(folder, 200)} is not a folder.", "Name a folder with YAML files of tasks.")
    manager = _manager(names, include)
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        found = _load(manager, name)
        if repeated := loaded["tasks"].keys() & found["tasks"].keys():
            raise UserError(f"Task '{min(repeated)}' is named twice, or is also in a group.", f"Remove '{name}' from --tasks.")
        for part, entries in loaded.items():
            entries.update(found[part])
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"Task '{name}' runs code that the model writes.", "Run it with lm_eval itself, in a sandbox.")
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"Task '{name}' has images or sound, and the model reads text.", "Choose other tasks.")
    return loaded


def _manager(names: Sequence[str], include: Sequence[Path]) -> Any:
    """Index of the tasks. The harness has more than ten thousand, which take seconds to read: only if they are needed."""
    folders = [str(folder) for folder in (OWN, *include)]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if any(name not in manager.all_tasks and not Path(name).is_file() for name in names):
        manager = TaskManager(include_path=folders)
    for name in names:
        if name not in manager.all_tasks and not Path(name).is_file():
            _raise_unreadable(manager, name, include)
            near = difflib.get_close_matches(name, manager.all_tasks, n=NEAREST)
            hint = f"Did you mean {' or '.join(repr(each) for each in near)}? " if near else ""
            fix = f"{hint}Name a task of lm-evaluation-harness, a YAML file, or one in a folder that --include names."
            raise UserError(f"There is no task '{shown(name)}'.", fix)
    return manager


def _raise_unreadable(manager: Any, name: str, include: Sequence[Path]) -> None:
    """The harness skips YAML files that it cannot read. Loads those that mention the task, for the reason."""
    for folder in include:
        for path in sorted(folder.rglob("*.yaml")):
            if name in path.read_text(errors="replace"):
                _load(manager, str(path))


def _load(manager: Any, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = manager.load([name])
    except ConnectionError as error:
        cause = f"Task '{shown(name, 200)}' needs a dataset from Hugging Face's hub: {shown(error, 200)}"
        fix = f"Connect this machine, or use a dataset on disk with --include. '{OFFLINE}' needs no network."
        raise UserError(cause, fix) from None
    except Exception as error:  # tasks are programs of others
        cause = f"Task '{shown(name, 200)}' cannot be loaded: {shown(f'{type(error).__name__}: {error}', 300)}"
        raise UserError(cause, "Correct the task's file and its dataset, or choose another task.") from error
    return found
