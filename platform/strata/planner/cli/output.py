"""Output of a result: terminal, JSON, folder of plots."""

import json
import math
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError, shown

WIDTH = 130  # of tables written to a file or a pipe


def console() -> Console:
    """Console without markup, since model names and paths may contain brackets."""
    found = Console(highlight=False, markup=False, emoji=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, emoji=False, width=WIDTH)


def jsonable(thing: Any) -> Any:
    """JSON form of a result. Dataclasses become objects of their fields, without worksheets, which `--explain` adds. Raises an
    error if a number is not finite."""
    if is_dataclass(thing) and not isinstance(thing, type):
        values = {field.name: getattr(thing, field.name) for field in fields(thing)}
        return {name: jsonable(value) for name, value in values.items() if not isinstance(value, Worksheet)}
    if isinstance(thing, dict):
        return {str(key): jsonable(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple | set | frozenset):
        return [jsonable(value) for value in thing]
    if isinstance(thing, float) and not math.isfinite(thing):
        raise UserError(f"The result is not a finite number: {thing}.", "Use less extreme values.")
    return thing


def write_json(data: dict[str, Any], target: str) -> None:
    """Write the result of `jsonable` to a file, or to standard output for `-`."""
    text = json.dumps(data, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        write_text(Path(target), text)


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{shown(path, 200)} cannot be written: {error.strerror}.", "Use another path.") from None


def plot_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{shown(folder, 200)} cannot be created: {error.strerror}.", "Set --plot to another folder.") from None
    return folder
