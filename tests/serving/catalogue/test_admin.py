"""Admin API of models, without engines."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from strata.serving.adapters.entry import Entry
from strata.serving.api.requests import ApiError
from strata.serving.catalogue.admin import Admin, is_route
from strata.serving.catalogue.document import Catalogue, Model, Revision

MAIN = Model((Revision("", "/main", {"port": 1}, "ready"),), main=True)


class Memory:
    """A store that holds the catalogue itself."""

    def __init__(self) -> None:
        self.catalogue = Catalogue(1, {"main": MAIN})

    async def read(self) -> Catalogue:
        return self.catalogue

    async def change(self, make: Callable[[Catalogue], Catalogue]) -> Catalogue:
        self.catalogue = make(self.catalogue)
        return self.catalogue


class Here:
    def __init__(self, fixed_main: str | None = None) -> None:
        self.store = Memory()
        self.prepared: list[tuple[Any, ...]] = []
        store: Any = self.store
        self.admin = Admin(store, self._prepare, fixed_main, lambda: {"tuned"})

    def _prepare(self, name: str, folder: str, changes: dict[str, Any], section: dict[str, Any]) -> Revision:
        if folder == "/broken":
            raise ApiError(400, "no weights")
        self.prepared.append((name, folder, changes, section))
        adapters = (Entry("x", "/x", "1", 4),) if "adapters" in changes else ()
        return Revision(f"r{len(self.prepared)}", folder, section | changes, adapters=adapters)

    def send(self, method: str, path: str, tree: Any = None) -> tuple[int, dict[str, Any]]:
        return asyncio.run(self.admin.handle(method, path, json.dumps(tree).encode() if tree is not None else b""))

    def refused(self, method: str, path: str, tree: Any = None) -> tuple[int, str]:
        before = self.store.catalogue
        with pytest.raises(ApiError) as caught:
            self.send(method, path, tree)
        assert self.store.catalogue is before
        return caught.value.status, str(caught.value)


def test_models_are_added_and_listed() -> None:
    here = Here()
    status, entry = here.send("POST", "/-/models", {"name": "small", "model": "/weights", "serve": {"max_sequences": 4}})
    assert status == 202 and entry["state"] == "starting"
    assert here.prepared == [("small", "/weights", {"max_sequences": 4}, {"port": 1})]
    status, listed = here.send("GET", "/-/models")
    assert status == 200 and [(each["name"], each["main"], each["state"]) for each in listed["data"]] == [
        ("main", True, "ready"),
        ("small", False, "starting"),
    ]
    here.store.catalogue = here.store.catalogue.failed("small", "r1", "out of memory", 5.0)
    failed = here.send("GET", "/-/models")[1]["data"][1]
    assert failed["state"] == "failed" and failed["revisions"][0]["reason"] == "out of memory"


def test_updates_keep_the_settings_of_the_model() -> None:
    here = Here()
    here.send("POST", "/-/models", {"name": "small", "model": "/one", "serve": {"max_sequences": 4}})
    assert here.refused("POST", "/-/models/small", {"model": "/two"})[0] == 409
    here.store.catalogue = here.store.catalogue.ready("small", "r1", 2.0)
    assert here.send("POST", "/-/models/small", {"model": "/two"})[0] == 202
    assert here.prepared[-1] == ("small", "/two", {}, {"port": 1, "max_sequences": 4})
    assert here.send("POST", "/-/models/main", {"model": "/new"})[0] == 202
    assert Here("not here").refused("POST", "/-/models/main", {"model": "/new"}) == (409, "not here")


def test_names_of_adapters_are_taken() -> None:
    here = Here()
    for path, tree in (("/-/models", {"name": "tuned", "model": "/x"}), ("/-/aliases/tuned", {"models": {"main": 1}})):
        status, words = here.refused("POST", path, tree)
        assert status == 409 and "name of an adapter" in words


def test_an_update_names_no_adapters() -> None:
    here, serve = Here(), {"adapters": {"load": {"x": "/x"}}}
    status, words = here.refused("POST", "/-/models/main", {"model": "/new", "serve": serve})
    assert status == 400 and "is for a new model" in words
    assert here.send("POST", "/-/models", {"name": "small", "model": "/new", "serve": serve})[0] == 202


def test_aliases() -> None:
    here = Here()
    status, made = here.send("POST", "/-/aliases/chat", {"models": {"main": 3}})
    assert status == 200 and made == {"name": "chat", "models": {"main": 3.0}}
    assert here.send("GET", "/-/models")[1]["aliases"] == {"chat": {"main": 3.0}}
    assert here.send("DELETE", "/-/aliases/chat")[0] == 200 and here.refused("DELETE", "/-/aliases/chat")[0] == 404


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"name": "small"},
        {"name": "small", "model": "relative"},
        {"name": "small", "model": 5},
        {"name": "a b", "model": "/weights"},
        {"name": "", "model": "/weights"},
        {"name": "x" * 64, "model": "/weights"},
        {"name": "../up", "model": "/weights"},
        {"name": "small\n", "model": "/weights"},
        {"name": ["small"], "model": "/weights"},
        {"name": "small", "model": "/broken"},
        {"name": "small", "model": "/weights", "serve": [1]},
        {"name": "small", "model": "/weights", "run": "x"},
    ],
)
def test_wrong_models_are_refused(tree: dict[str, Any]) -> None:
    assert Here().refused("POST", "/-/models", tree)[0] == 400


@pytest.mark.parametrize("models", [None, {}, [], {"main": "1"}, {"main": -1}, {"main": 0}, {"main": True}, {"main": 1e300}])
def test_wrong_weights_are_refused(models: Any) -> None:
    assert Here().refused("POST", "/-/aliases/chat", {"models": models})[0] == 400


def test_unknown_routes_and_names() -> None:
    here = Here()
    assert (
        here.refused("DELETE", "/-/models/none")[0] == 404 and here.refused("POST", "/-/models/none", {"model": "/x"})[0] == 404
    )
    assert here.refused("PUT", "/-/models")[0] == 405 and here.refused("GET", "/-/aliases/x")[0] == 405
    assert here.refused("POST", "/-/models/a/b", {"model": "/x"})[0] == 405
    assert here.refused("POST", "/-/models", [1])[0] == 400
    assert is_route("/-/models") and is_route("/-/aliases/x") and not is_route("/-/modelsx") and not is_route("/v1/models")
