"""Models by name, from `models.yaml`, a Hugging Face config.json or a recipe."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from stat import S_ISREG
from typing import Any

from strata.planner.catalogue.check_shape import check_shape
from strata.planner.catalogue.huggingface import from_config
from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.platform import recipe_file
from strata.platform.errors import UserError, shown
from strata.platform.hardware.catalogue_file import Catalogue, nearest, parse, read
from strata.platform.recipe import ModelSection

FOLDER = Path(__file__).parent
MOST_CONFIG = 2**24  # bytes
PUBLISHED = ("published_parameters_b", "published_active_b")
PARTS: dict[str, type] = {"experts": Experts, "latent": Latent}


@dataclass(frozen=True)
class Published:
    """Billions of parameters, as a model's authors publish them."""

    parameters: float | None = None
    active: float | None = None


def model(name: str) -> Shape:
    return _models().find("model", name)


def published(name: str) -> Published:
    entry = _entries()[model(name).name]
    return Published(*(entry.get(key) for key in PUBLISHED))


def model_names() -> list[str]:
    return list(_models().entries)


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
    raise UserError(cause, nearest(reference, _models().keys | {name: name for name in recipe_file.names()}))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False


def from_recipe(section: ModelSection, name: str) -> Shape:
    if section.picture:
        raise UserError(
            f"{name} is a picture model, and plans are for language models.", "Choose a recipe without model.picture."
        )
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
        experts=Experts(moe.experts, moe.top_k, section.ffn, moe.shared_ffn, shared_gate=moe.shared_ffn > 0) if moe else None,
    )
    return check_shape(shape)


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return read(FOLDER / "models.yaml")


@cache
def _models() -> Catalogue[Shape]:
    shapes = {name: {key: entry[key] for key in entry.keys() - PUBLISHED} for name, entry in _entries().items()}
    return parse(shapes, Shape, "models.yaml", PARTS)


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
