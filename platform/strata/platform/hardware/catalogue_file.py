"""YAML files of named entries, parsed into dataclasses and found under several spellings."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from strata.platform.errors import UserError, shown

ALSO = "also"  # an entry's other names
LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is installed

T = TypeVar("T")


@dataclass(frozen=True)
class Catalogue(Generic[T]):
    """Entries by name. `keys` maps every spelling under which an entry is found to its name."""

    entries: dict[str, T]
    keys: dict[str, str]

    def __contains__(self, name: str) -> bool:
        return any(spelling in self.keys for spelling in _spellings(name))

    def find(self, what: str, name: str) -> T:
        for spelling in _spellings(name):
            if spelling in self.keys:
                return self.entries[self.keys[spelling]]
        raise UserError(f"There is no {what} '{shown(name)}' in the catalogue.", nearest(name, self.keys))


def read(path: Path) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = yaml.load(path.read_text(), LOADER)
    return entries


def parse(
    entries: Mapping[str, Mapping[str, Any]], kind: type[T], source: str, parts: Mapping[str, type] | None = None
) -> Catalogue[T]:
    """Unknown fields are refused: a misspelt field would leave its default in force. `parts` are the dataclasses of nested
    fields, `source` names the file in errors."""
    found: Catalogue[T] = Catalogue({}, {})
    adapter = TypeAdapter(kind)
    for name, entry in entries.items():
        where = f"{source}: {name}"
        for key in (name, *entry.get(ALSO, [])):
            exact, _ = _spellings(key)
            if found.keys.setdefault(exact, name) != name:
                raise UserError(f"{where} has the name '{key}' of {found.keys[exact]}.", "Give it another name.")
        values = {key: value for key, value in entry.items() if key != ALSO}
        _refuse_unknown(values, kind, where, parts or {})
        try:
            found.entries[name] = adapter.validate_python({"name": name} | values)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(str(part) for part in problem["loc"])
            raise UserError(f"{where}: {key}: {problem['msg']}.", "Correct the entry.") from None
    for exact, name in list(found.keys.items()):
        found.keys.setdefault(exact.replace(".", ""), name)
    return found


def nearest(name: str, keys: Mapping[str, str]) -> str:
    """A fix that lists the entries with the most similar names, or all entries where none is similar."""
    near = difflib.get_close_matches(_spellings(name)[0], keys, n=6, cutoff=0.5)
    names = list(dict.fromkeys(keys[key] for key in near))[:3]  # two keys may belong to the same entry
    if names:
        return f"Did you mean {' or '.join(names)}?"
    return f"There are {', '.join(dict.fromkeys(keys.values()))}."


def _refuse_unknown(entry: Mapping[str, Any], kind: type[Any], where: str, parts: Mapping[str, type]) -> None:
    known = [field.name for field in fields(kind) if field.name != "name"]
    for key, value in entry.items():
        if key not in known:
            raise UserError(f"{where} has no field '{key}'.", f"Its fields are {', '.join(known)}.")
        if key in parts and isinstance(value, dict):
            _refuse_unknown(value, parts[key], f"{where}.{key}", {})


def _spellings(name: str) -> tuple[str, str]:
    """Lower case without separators; the second without dots too, which distinguish gpt-3-1.3b from gpt-3-13b."""
    exact = "".join(letter for letter in name.lower() if letter not in "-_ ")
    return exact, exact.replace(".", "")
