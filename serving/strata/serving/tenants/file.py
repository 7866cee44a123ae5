"""File of tenants and the hashes of their keys: parsing, with the line of every error, and writing.

    tenants:
      team-a:
        keys:
        - sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        weight: 2
        tokens_per_day: 5000000

Two other forms of YAML are refused because they would hide mistakes: keys that appear twice, and aliases.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from strata.platform import yaml_text
from strata.serving.tenants.tenant import NAME, KeyEntry, Limits, Section, Tenant, short_id

MAX_BYTES = 16 * 2**20
MAX_DEPTH = 8
# A line of one of these marks the format. A file without them has one key per line.
_MARKS = re.compile(rb"""^[\s{"'-]*(tenants|sha256|lend_idle)["']?\s*:""", re.MULTILINE)

Place = tuple[str, ...]  # keys and indices that lead to an entry


class WrongContent(ValueError):
    """The first error of a file, with its line."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line, self.reason = line, reason


class TenantEntry(Limits):
    keys: tuple[KeyEntry, ...] = Field((), description="hashes of the tenant's keys")


class _File(Section):
    tenants: dict[str, TenantEntry] = Field({}, description="tenants by name")
    lend_idle: bool = Field(False, strict=True, description="let tenants use the share of those that do not need theirs")


@dataclass(frozen=True)
class Known:
    """Owner of a key."""

    tenant: Tenant
    key: str  # its short id
    expires: float | None = None  # Unix time


@dataclass(frozen=True)
class Content:
    keys: Mapping[bytes, Known] = field(default_factory=dict)  # by digest
    lend_idle: bool = False


def is_tenants(data: bytes, file: Path) -> bool:
    """True for the format of this module, False for one key per line. Content that resembles this format is never read as keys:
    a misspelt file must not make its own lines valid."""
    return file.suffix in (".yaml", ".yml") or _MARKS.search(data) is not None


def parse(data: bytes) -> Content:
    """Raises WrongContent."""
    entries, lines = _entries(data)
    keys: dict[bytes, Known] = {}
    for name, entry in entries.tenants.items():
        tenant = Tenant(name, Limits(**{each: getattr(entry, each) for each in Limits.model_fields}))
        for number, key in enumerate(entry.keys):
            found = bytes.fromhex(key.sha256)
            if found in keys:
                line = _line(lines, ("tenants", name, "keys", str(number)))
                raise WrongContent(line, f"the key is one of tenant '{keys[found].tenant.name}' already")
            keys[found] = Known(tenant, short_id(found), _timestamp(key.expires))
    return Content(keys, entries.lend_idle)


def _timestamp(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def _entries(data: bytes) -> tuple[_File, dict[Place, int]]:
    if len(data) > MAX_BYTES:
        raise WrongContent(1, f"the file is larger than {MAX_BYTES // 2**20} MiB")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise WrongContent(data.count(b"\n", 0, error.start) + 1, "the text is not UTF-8") from None
    lines: dict[Place, int] = {}
    loader = yaml.CSafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            _walk(node, (), lines, set())
        tree = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise WrongContent(mark.line + 1 if mark else 1, str(error.problem or error.context)) from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, WrongContent):
            raise
        raise WrongContent(1, " ".join(str(error).split())[:300]) from None
    finally:
        loader.dispose()
    if not isinstance(tree, dict):
        raise WrongContent(1, "the file must begin with 'tenants:'")
    try:
        entries = _File.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = tuple(str(part) for part in first["loc"])
        raise WrongContent(_line(lines, place), f"{'.'.join(place)}: {first['msg']}") from None
    for name in entries.tenants:
        if not re.match(NAME, name) or name.endswith("\n"):
            line = _line(lines, ("tenants", name))
            raise WrongContent(line, "a tenant's name has lower-case letters, digits, '.', '_' and '-', 63 at most")
    return entries, lines


def _walk(node: yaml.Node, path: Place, lines: dict[Place, int], seen: set[int]) -> None:
    """Collects the line of every entry."""
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if len(path) > MAX_DEPTH:
        raise WrongContent(line, f"the file is nested deeper than {MAX_DEPTH} levels")
    if isinstance(node, yaml.ScalarNode):
        return
    if id(node) in seen:
        raise WrongContent(line, "aliases are not allowed")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for number, entry in enumerate(node.value):
            _walk(entry, (*path, str(number)), lines, seen)
        return
    for key, value in node.value:
        name = (*path, str(key.value) if isinstance(key, yaml.ScalarNode) else "")
        if name in lines:
            raise WrongContent(key.start_mark.line + 1, f"'{name[-1]}' appears twice")
        lines[name] = key.start_mark.line + 1
        _walk(value, name, lines, seen)


def _line(lines: dict[Place, int], path: Place) -> int:
    """Line of an entry, or of the nearest one around it."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def read(file: Path) -> dict[str, TenantEntry]:
    """Tenants of a file, none of one that does not exist. Raises WrongContent and OSError."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return {}
    if data.strip() and not is_tenants(data, file):
        raise WrongContent(1, "the file has one key per line, not tenants")
    parse(data)  # refuses keys of two tenants
    return dict(_entries(data)[0].tenants)


def write(file: Path, tenants: Mapping[str, TenantEntry]) -> None:
    """Writes the tenants, atomically; readers of other users are excluded unless the file had them before. Other top-level
    settings stay."""
    file = file.resolve()  # a link stays one
    before: dict[str, Any] = yaml.safe_load(file.read_bytes()) or {} if file.exists() else {}
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    tree = {"tenants": {name: _plain(entry) for name, entry in tenants.items()}}
    text = yaml_text.dump_all([tree | {key: value for key, value in before.items() if key != "tenants"}])
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        os.fchmod(handle, mode)
        with os.fdopen(handle, "w") as output:
            output.write(text)
            output.flush()
            os.fsync(output.fileno())
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _plain(entry: TenantEntry) -> dict[str, Any]:
    """The entry as it is written: what was set, with key hashes first."""
    found = entry.model_dump(exclude_unset=True, exclude={"keys"})
    if "models" in found and found["models"] is not None:
        found["models"] = list(found["models"])
    keys = [{"sha256": key.sha256} | ({"expires": key.expires} if key.expires else {}) for key in entry.keys]
    return {"keys": keys} | found
