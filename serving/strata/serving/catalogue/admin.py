"""Admin API of the models: `/-/models` and `/-/aliases`.

    GET    /-/models                {"object": "list", "data": [...], "aliases": {...}}
    POST   /-/models                {"name", "model": folder, "serve": {...}}: adds a model
    POST   /-/models/NAME           {"model": folder, "serve": {...}}: replaces its weights, without a failed request
    DELETE /-/models/NAME           removes a model after its last request
    POST   /-/aliases/NAME          {"models": {model: weight}}
    DELETE /-/aliases/NAME

Changes are answered at once, with 202 where engines start or end. `GET /-/models` has the progress.
"""

import asyncio
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from strata.platform.recipe.serve import MODEL_NAME
from strata.serving.api import requests
from strata.serving.api.requests import ApiError
from strata.serving.catalogue.document import Catalogue, Model, Revision
from strata.serving.catalogue.store import Store

MODELS, ALIASES = "/-/models", "/-/aliases"
MAX_ALIASES = 256
MAX_MODELS = 64

# Makes the revision of a model: its name, folder, changes of the serve section, and the section that they change. Raises ApiError
# if it cannot be served.
Prepare = Callable[[str, str, dict[str, Any], dict[str, Any]], Revision]


def is_route(path: str) -> bool:
    return path in (MODELS, ALIASES) or path.startswith((f"{MODELS}/", f"{ALIASES}/"))


@dataclass(frozen=True)
class Admin:
    store: Store
    prepare: Prepare
    fixed_main: str | None = None  # reason why the main model cannot be updated here
    adapters: Callable[[], Collection[str]] = tuple  # names of all models' adapters

    async def handle(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and answer. Raises ApiError."""
        base, name = (path, "") if path in (MODELS, ALIASES) else path.rsplit("/", 1)
        match base, bool(name), method:
            case "/-/models", False, "GET":
                return 200, listing(await self.store.read() or Catalogue())
            case "/-/models", False, "POST":
                return await self._add(requests.parse(body))
            case "/-/models", True, "POST":
                return await self._update(name, requests.parse(body))
            case "/-/models", True, "DELETE":
                after = await self.store.change(lambda now: now.remove(name))
                return 202, _entry(name, after.models[name])
            case "/-/aliases", True, "POST":
                return await self._alias(name, requests.parse(body))
            case "/-/aliases", True, "DELETE":
                await self.store.change(lambda now: _without(now, name))
                return 200, {"name": name, "removed": True}
        raise ApiError(405, f"{method} {path} is not allowed.")

    async def _add(self, tree: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = self._free(tree.get("name"))
        before = await self.store.read() or Catalogue()
        main = before.require(before.main or "")
        assert main.serving is not None
        if len(before.models) >= MAX_MODELS:
            raise ApiError(409, f"An endpoint has at most {MAX_MODELS} models.")
        before.add(name, main.serving)  # refuses a name that is taken before the checks, which take time
        revision = await _made(self.prepare, name, tree, main.serving.section)
        after = await self.store.change(lambda now: now.add(name, revision))
        return 202, _entry(name, after.models[name])

    async def _update(self, name: str, tree: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        before = await self.store.read() or Catalogue()
        model = before.require(name)
        if model.main and self.fixed_main is not None:
            raise ApiError(409, self.fixed_main)
        before.update(name, model.revisions[-1])
        assert model.serving is not None
        revision = await _made(self.prepare, name, tree, model.serving.section)
        if revision.adapters:
            message = "serve.adapters.load is for a new model. An update keeps the model's adapters; add others when it serves."
            raise ApiError(400, message, param="serve")
        after = await self.store.change(lambda now: now.update(name, revision))
        return 202, _entry(name, after.models[name])

    async def _alias(self, name: str, tree: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        weights = _weights(tree.get("models"))
        self._free(name)
        after = await self.store.change(lambda now: _few(now.alias(name, weights)))
        return 200, {"name": name, "models": after.aliases[name]}

    def _free(self, name: Any) -> str:
        if _named(name) in self.adapters():
            raise ApiError(409, f"'{name}' is the name of an adapter. Remove it first, or choose another name.", param="name")
        return str(name)


async def _made(prepare: Prepare, name: str, tree: dict[str, Any], section: dict[str, Any]) -> Revision:
    folder, changes = tree.get("model"), tree.get("serve") or {}
    if not isinstance(folder, str) or not folder.startswith("/"):
        raise ApiError(400, "'model' must be the absolute path of a model folder.", param="model")
    if not isinstance(changes, dict):
        raise ApiError(400, "'serve' must be an object with keys of the serve section.", param="serve")
    if unknown := tree.keys() - {"name", "model", "serve"}:
        raise ApiError(400, f"Unknown key '{min(unknown)}'.", param=min(unknown))
    return await asyncio.to_thread(prepare, name, folder, changes, section)


def _named(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(MODEL_NAME.strip("^$"), name):
        raise ApiError(400, "A name has letters, digits, '.', '_' and '-', 63 at most.", param="name")
    return name


def _weights(given: Any) -> dict[str, float]:
    numbers = isinstance(given, dict) and all(
        isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight <= 1e9 for weight in given.values()
    )
    if not numbers or not sum(given.values()):
        raise ApiError(400, '\'models\' must name models with their weights, such as {"a": 95, "b": 5}.', param="models")
    return {model: float(weight) for model, weight in given.items()}


def _few(after: Catalogue) -> Catalogue:
    if len(after.aliases) > MAX_ALIASES:
        raise ApiError(409, f"An endpoint has at most {MAX_ALIASES} aliases.")
    return after


def _without(now: Catalogue, alias: str) -> Catalogue:
    if alias not in now.aliases:
        raise ApiError(404, f"There is no alias '{alias}'.", param="name")
    return now.without_alias(alias)


def listing(catalogue: Catalogue) -> dict[str, Any]:
    models = [_entry(name, model) for name, model in catalogue.models.items()]
    return {"object": "list", "data": models, "aliases": catalogue.aliases}


def _entry(name: str, model: Model) -> dict[str, Any]:
    revisions = [
        {"id": each.id, "model": each.folder, "state": each.state, "reason": each.reason, "since": each.since}
        for each in model.revisions
    ]
    return {"name": name, "main": model.main, "state": state_of(model), "revisions": revisions}


def state_of(model: Model) -> str:
    """State of a model in a word or two."""
    if model.removed:
        return "removing"
    latest = model.revisions[-1].state
    if model.serving is None:
        return latest
    return {"starting": "updating", "failed": "update failed"}.get(latest, "ready")
