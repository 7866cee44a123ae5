"""Loads a recipe: file, `extends` chain and command-line overrides, validated as a `Recipe`."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import typer
import yaml
from pydantic import BaseModel, ValidationError

from strata.platform.errors import UserError
from strata.platform.recipe import Recipe

DEFAULT = "laptop"
# The argument of every command with a recipe.
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value]...", help="Changes to the recipe, such as train.steps=50."),
]


class RecipeError(UserError):
    pass


def recipes_dir() -> Path:
    """The folder of the built-in recipes: inside this package in a wheel, `platform/recipes` in a checkout."""
    packaged = Path(__file__).parent / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "recipes"


def names() -> list[str]:
    return sorted(path.stem for path in recipes_dir().glob("*.yaml"))


def load(source: str = DEFAULT, overrides: Sequence[str] = ()) -> Recipe:
    """`source`: the name of a built-in recipe, or a path. An override is `section.key=value`."""
    tree = _read_with_ancestors(_locate(source, beside=None), seen=())
    return check(_overridden(tree, overrides), source)


def change(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A copy of the recipe with the overrides applied."""
    return check(_overridden(recipe.model_dump(mode="json"), overrides), "in memory")


def changes(overrides: Sequence[str], section: str) -> dict[str, Any]:
    """Overrides of one section as a tree."""
    tree: dict[str, Any] = {}
    for override in overrides:
        if not override.startswith(f"{section}."):
            raise RecipeError(f"'{override}' is not of the section '{section}'.", f"Write {section}.key=value.")
        _apply(tree, override)
    found: dict[str, Any] = tree.get(section, {})
    return found


def check(tree: dict[str, Any], source: str) -> Recipe:
    """Validates a recipe. A model to import and a teacher are looked up, unless that was done before: a run's own recipe needs
    neither."""
    model = tree.get("model")
    if _imports(model) and model.get("family") is None:
        from strata.platform.model_families.imported import resolve

        tree = tree | {"model": resolve(model)}
    train = tree.get("train")
    if isinstance(train, dict) and isinstance(teacher := train.get("distill"), str) and not Path(teacher).is_absolute():
        from strata.platform.model_families import source as sources

        tree = tree | {"train": train | {"distill": str(sources.local(teacher, "train.distill") or teacher)}}
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, source) from None


def dump(recipe: Recipe) -> str:
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _locate(source: str, beside: Path | None) -> Path:
    looks_like_path = source.endswith((".yaml", ".yml")) or "/" in source
    path = (beside / source if beside else Path(source)) if looks_like_path else recipes_dir() / f"{source}.yaml"
    if not _is_file(path):
        near = difflib.get_close_matches(source, names(), n=1)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        raise RecipeError(f"No recipe '{source[:200]}'.", f"{hint}Pass the path of a YAML file, or one of: {', '.join(names())}.")
    return path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # for example a name that is too long
        return False


def _read_with_ancestors(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise RecipeError(f"Recipes extend each other in a circle: {chain}.", "Remove one 'extends'.")
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path.name} is not valid YAML: {' '.join(str(error).split())}", "Correct the file.") from None
    except RecursionError:
        raise RecipeError(f"{path.name} is not a recipe: it is nested too deeply.", "Pass another file.") from None
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{path.name} holds a {type(tree).__name__}, not sections.", "Start it with a section such as 'train:'."
        )
    parent = tree.pop("extends", None)
    base = _read_with_ancestors(_locate(str(parent), beside=path.parent), (*seen, path)) if parent is not None else {}
    own, inherited = tree.get("model"), base.get("model")
    if isinstance(own, dict) and own.get("family") is None and (_imports(own) or (_imports(inherited) and "from" not in own)):
        _require_no_shape(own, path.name)
    return _merge(base, tree)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for override in overrides:
        _apply(tree, override)
        _apply(changes, override)
    model, changed = tree.get("model"), changes.get("model")
    if _imports(model) and isinstance(changed, dict):
        _require_no_shape(changed, "the overrides")
        model["family"] = None  # looked up again: the changed keys depend on the model
    return tree


def _imports(model: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(model, dict) and model.get("from") is not None


def _require_no_shape(model: dict[str, Any], where: str) -> None:
    """Refuses keys beside `model.from` that the imported model decides. Inherited ones are ignored instead: most recipes extend
    one that trains a model from scratch."""
    for key in _leaves(model, "model."):
        if key not in ("model.from", "model.context", "model.moe.balance"):
            cause = f"{key} in {where} cannot be set beside model.from: the imported model decides it."
            raise RecipeError(cause, f"Remove {key}, or model.from.")


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"'{override}' is not an override.", "Write section.key=value, such as train.steps=50.")
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        if node.get(parent) is None:  # absent, or a section that is turned off
            node[parent] = {}
        if not isinstance(node[parent], dict):
            raise RecipeError(f"Unknown recipe key '{key}'.", _nearest(key))
        node = node[parent]
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RecipeError(f"The value of '{override}' is not valid YAML.", "Quote it.") from None


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + (field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")


def _nearest(key: str) -> str:
    """Suggests a valid key: first by the whole dotted key, then by its last part (`steps` for `train.steps`)."""
    keys = list(_keys(Recipe))
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    leaf = key.rsplit(".", 1)[-1]
    near = near or [k for k in keys if k.rsplit(".", 1)[-1] == leaf]
    near = near or difflib.get_close_matches(key, keys, n=1, cutoff=0.4)
    return f"The nearest valid key is '{near[0]}'." if near else f"Valid sections: {', '.join(Recipe.model_fields)}."


def _explain(error: ValidationError, source: str) -> RecipeError:
    """Reports the first problem only: the others are often its consequences."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "extra_forbidden":
            return RecipeError(f"Unknown recipe key '{key}' in {source}.", _nearest(key))
        case "missing":
            return RecipeError(f"Recipe {source} lacks '{key}'.", "Add it, or start with 'extends: laptop'.")
        case "value_error":
            where = f"{key}: " if key else ""
            return RecipeError(f"{where}{problem['ctx']['error']} (recipe {source}).", "Change one of them.")
        case _:
            text = problem["msg"][0].lower() + problem["msg"][1:]
            return RecipeError(f"{key}={problem['input']!r} in recipe {source}: {text}.", "Change the value.")
