"""Changes of the catalogue of models."""

import pytest

from strata.serving.api.requests import ApiError
from strata.serving.catalogue.admin import state_of
from strata.serving.catalogue.document import Catalogue, Model, Revision

MAIN = Model((Revision("", "/main", {}, "ready"),), main=True)
START = Catalogue(1, {"main": MAIN})


def revision(id: str) -> Revision:
    return Revision(id, f"/{id}", {"port": 8000}, "starting", 1.0)


def states(catalogue: Catalogue, name: str) -> dict[str, str]:
    return {each.id: each.state for each in catalogue.models[name].revisions}


def refused(status: int, change: object) -> str:
    with pytest.raises(ApiError) as caught:
        change()  # type: ignore[operator]
    assert caught.value.status == status
    return str(caught.value)


def test_a_model_starts_serves_and_ends() -> None:
    added = START.add("small", revision("a"))
    assert added.models["small"].serving is None and state_of(added.models["small"]) == "starting"
    ready = added.ready("small", "a", 2.0)
    assert ready.models["small"].serving == Revision("a", "/a", {"port": 8000}, "ready", 2.0, origin="a")
    removed = ready.remove("small")
    assert removed.models["small"].serving is None and states(removed, "small") == {"a": "draining"}
    assert removed.models["small"].revisions[0].version == removed.version
    refused(409, lambda: removed.add("small", revision("b")))
    refused(404, lambda: removed.remove("small"))
    assert removed.ended("small", "a").models == {"main": MAIN}
    assert Catalogue.decode(removed.encode()) == removed


def test_an_update_replaces_the_weights_only_when_they_are_ready() -> None:
    serving = START.add("small", revision("a")).ready("small", "a", 2.0)
    updating = serving.update("small", revision("b"))
    assert states(updating, "small") == {"a": "ready", "b": "starting"} and state_of(updating.models["small"]) == "updating"
    refused(409, lambda: updating.update("small", revision("c")))
    switched = updating.ready("small", "b", 3.0)
    assert states(switched, "small") == {"a": "draining", "b": "ready"} and state_of(switched.models["small"]) == "ready"
    assert states(switched.ended("small", "a"), "small") == {"b": "ready"}
    third = switched.ended("small", "a").update("small", revision("c"))
    assert [each.origin for each in third.models["small"].revisions] == ["a", "a"]
    assert START.update("main", revision("b")).models["main"].revisions[-1].origin == ""


def test_an_update_that_fails_leaves_the_old_weights_and_its_reason() -> None:
    serving = START.add("small", revision("a")).ready("small", "a", 2.0)
    failed = serving.update("small", revision("b")).failed("small", "b", "no memory", 3.0)
    assert failed.models["small"].serving is not None and state_of(failed.models["small"]) == "update failed"
    assert states(failed.update("small", revision("c")), "small") == {"a": "ready", "c": "starting"}


def test_a_model_that_failed_can_be_added_again() -> None:
    failed = START.add("small", revision("a")).failed("small", "a", "broken", 2.0)
    refused(409, lambda: failed.update("small", revision("b")))
    assert states(failed.add("small", revision("b")), "small") == {"b": "starting"}
    assert states(failed.remove("small"), "small") == {"a": "draining"}


def test_names_are_unique_and_the_main_model_stays() -> None:
    refused(409, lambda: START.add("main", revision("a")))
    refused(409, lambda: START.remove("main"))
    refused(404, lambda: START.update("other", revision("a")))
    aliased = START.alias("chat", {"main": 1.0})
    refused(409, lambda: aliased.add("chat", revision("a")))
    refused(409, lambda: START.alias("main", {"main": 1.0}))


def test_aliases_name_models_that_serve() -> None:
    added = START.add("small", revision("a"))
    refused(404, lambda: added.alias("chat", {"small": 1.0}))
    refused(404, lambda: added.alias("chat", {"nothing": 1.0}))
    aliased = added.ready("small", "a", 2.0).alias("chat", {"main": 95, "small": 5})
    assert "chat" in refused(409, lambda: aliased.remove("small"))
    assert aliased.without_alias("chat").remove("small").models["small"].removed


def test_versions_grow() -> None:
    changes = [START.add("a", revision("1")), START.alias("x", {"main": 1}), START.update("main", revision("2"))]
    assert {each.version for each in changes} == {2} and START.version == 1
