"""Models, GPUs and fabrics by name, from the files in `catalogue/`; and a model from wherever a user has one: its name, its
Hugging Face config or a recipe."""

import difflib
import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from stat import S_ISREG
from typing import Any, Generic, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from strata.planner.catalogue.check_shape import check_shape
from strata.planner.catalogue.hardware import Fabric, Gpu
from strata.planner.catalogue.huggingface import from_config
from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.planner.ranges import shown
from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection

CATALOGUE = Path(__file__).parent
MOST_CONFIG = 2**24  # bytes
ALSO = "also"  # an entry's other names
PUBLISHED = ("published_parameters_b", "published_active_b")
PARTS: dict[str, type] = {"experts": Experts, "latent": Latent}
LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # about ten times as fast, where libyaml is there

T = TypeVar("T")


@dataclass(frozen=True)
class Published:
    """What a model's authors say of its size, in billions of parameters."""

    parameters: float | None = None
    active: float | None = None


@dataclass(frozen=True)
class Shelf(Generic[T]):
    """One file of the catalogue. `keys` are all the spellings under which its things are found."""

    things: dict[str, T]
    keys: dict[str, str]
    published: dict[str, Published]

    def __contains__(self, name: str) -> bool:
        return any(spelling in self.keys for spelling in _spellings(name))

    def find(self, what: str, name: str) -> T:
        for spelling in _spellings(name):
            if spelling in self.keys:
                return self.things[self.keys[spelling]]
        raise UserError(f"There is no {what} '{shown(name)}' in the catalogue.", _nearest(name, self.keys))


def model(name: str) -> Shape:
    return _models().find("model", name)


def gpu(name: str) -> Gpu:
    return _gpus().find("GPU", name)


def has_gpu(name: str) -> bool:
    return name in _gpus()


def fabric(name: str) -> Fabric:
    return _fabrics().find("fabric", name)


def published(name: str) -> Published:
    return _models().published[model(name).name]


def model_names() -> list[str]:
    return list(_models().things)


def gpu_names() -> list[str]:
    return list(_gpus().things)


def fabric_names() -> list[str]:
    return list(_fabrics().things)


def open_model(reference: str) -> Shape:
    """A name from the catalogue, the name or path of a recipe, or the path of a Hugging Face config.json or its folder. A path
    with a slash in it is never taken for a name."""
    if reference in _models():
        return model(reference)
    path = Path(reference)
    if reference in recipe_file.names() or path.suffix in (".yaml", ".yml"):
        return from_recipe(recipe_file.load(reference).model, path.stem)
    if reference and _is_folder(path):
        path = path / "config.json"
    if path.suffix == ".json":
        return from_config(_read_json(path), path.resolve().parent.name if path.name == "config.json" else path.stem)
    cause = f"'{shown(reference)}' is no model of the catalogue, no recipe and no folder with a config.json."
    raise UserError(cause, _nearest(reference, _models().keys | {name: name for name in recipe_file.names()}))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False


def from_recipe(section: ModelSection, name: str) -> Shape:
    moe = section.moe
    shape = Shape(
        name=name,
        layers=section.layers,
        hidden=section.hidden,
        heads=section.heads,
        kv_heads=section.kv_heads,
        head_dim=section.head_dim,
        ffn=section.ffn,
        vocab=section.vocab,
        context=section.context,
        tied=section.tie_embeddings,
        experts=Experts(moe.experts, moe.top_k, section.ffn, moe.shared_ffn) if moe else None,
    )
    return check_shape(shape)


@cache
def _models() -> Shelf[Shape]:
    return read(CATALOGUE / "models.yaml", Shape)


@cache
def _gpus() -> Shelf[Gpu]:
    return read(CATALOGUE / "gpus.yaml", Gpu)


@cache
def _fabrics() -> Shelf[Fabric]:
    return read(CATALOGUE / "fabrics.yaml", Fabric)


def read(path: Path, kind: type[T]) -> Shelf[T]:
    """Names and types are checked: a misspelt field would leave a default in force."""
    shelf: Shelf[T] = Shelf({}, {}, {})
    adapter = TypeAdapter(kind)
    for name, entry in yaml.load(path.read_text(), LOADER).items():
        where = f"{path.name}: {name}"
        for key in (name, *entry.pop(ALSO, [])):
            exact, _ = _spellings(key)
            if shelf.keys.setdefault(exact, name) != name:
                raise UserError(f"{where} has the name '{key}' of {shelf.keys[exact]}.", "Give it another one.")
        if kind is Shape:
            shelf.published[name] = Published(*(entry.pop(key, None) for key in PUBLISHED))
        _refuse_unknown(entry, kind, where)
        try:
            shelf.things[name] = adapter.validate_python({"name": name} | entry)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(str(part) for part in problem["loc"])
            raise UserError(f"{where}: {key}: {problem['msg']}.", "Mend the entry.") from None
    for exact, name in list(shelf.keys.items()):
        shelf.keys.setdefault(exact.replace(".", ""), name)
    return shelf


def _refuse_unknown(entry: dict[str, Any], kind: type[Any], where: str) -> None:
    known = [field.name for field in fields(kind) if field.name != "name"]
    for key, value in entry.items():
        if key not in known:
            raise UserError(f"{where} has no field '{key}'.", f"Its fields are {', '.join(known)}.")
        if key in PARTS and isinstance(value, dict):
            _refuse_unknown(value, PARTS[key], f"{where}.{key}")


def _read_json(path: Path) -> dict[str, Any]:
    fix = "Give the path of a config.json or its folder."
    try:
        found = path.stat()
        if not S_ISREG(found.st_mode):
            raise UserError(f"{shown(path, 200)} is not a file.", fix)
        if found.st_size > MOST_CONFIG:
            raise UserError(f"{shown(path, 200)} has {found.st_size:,} bytes, and a model's config a few thousand.", fix)
        config = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{shown(path, 200)} cannot be read: {error.strerror}.", fix) from None
    except RecursionError:
        raise UserError(f"{shown(path, 200)} is not a model's config: it is nested too deeply.", fix) from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{shown(path, 200)} is not valid JSON: {shown(error, 120)}.", "Correct the file.") from None
    if not isinstance(config, dict):
        raise UserError(f"{shown(path, 200)} holds a {type(config).__name__}, not a model's config.", "Give another file.")
    return config


def _spellings(name: str) -> tuple[str, str]:
    """Without what people write differently; the second without dots too, which tell gpt-3-1.3b from gpt-3-13b."""
    exact = "".join(letter for letter in name.lower() if letter not in "-_ ")
    return exact, exact.replace(".", "")


def _nearest(name: str, keys: dict[str, str]) -> str:
    near = difflib.get_close_matches(_spellings(name)[0], keys, n=6, cutoff=0.5)
    names = list(dict.fromkeys(keys[key] for key in near))[:3]  # two of the keys may be one thing's
    if names:
        return f"Did you mean {' or '.join(names)}?"
    return f"There are {', '.join(dict.fromkeys(keys.values()))}."
