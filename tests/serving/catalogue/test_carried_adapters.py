"""Adapters of a model whose weights are replaced, as a gateway has them: a directory in memory, no engines."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import ServeSection
from strata.serving.adapters.entry import ROLE, Entry, store
from strata.serving.catalogue.document import Revision
from strata.serving.runtime import pools
from strata.serving.runtime.models import controller, from_recipe
from strata.serving.runtime.models.followed import FollowedModels
from strata.serving.spec import GatewaySpec, Network
from strata.serving.transport.directory import Directory

from ..adapters import peft_folder
from ..transport import memory_store

NETWORK = Network("127.0.0.1", b"s" * 32)
FIRST = Entry("first", "/adapters/first", "1", 4)


@pytest.fixture(autouse=True)
def kv(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    return memory_store.replace(monkeypatch)


def section(*overrides: str) -> ServeSection:
    return recipe_file.load("laptop", [f"serve.{word}" for word in overrides]).serve


def spec(*overrides: str) -> GatewaySpec:
    return replace(GatewaySpec.of(section("adapters={}", *overrides), "main", NETWORK), adapters=(FIRST,), folder="/main")


def revision(id: str, endpoint: GatewaySpec) -> Revision:
    own = ServeSection.model_validate(endpoint.section).further({})
    return Revision(id, f"/{id}", own.model_dump(mode="json", exclude={"models"}), "starting", 1.0, adapters=())


def run(test: Callable[[FollowedModels], Awaitable[None]], endpoint: GatewaySpec) -> None:
    async def begin() -> None:
        followed = FollowedModels(endpoint, "g", pools.main(endpoint, "g"), None)
        first = Revision("", "/main", endpoint.section, "ready", 1.0, adapters=endpoint.adapters)
        await followed.store.change(lambda now: replace(now.add("main", first), models={"main": _main(first)}))
        await followed.refresh()
        await asyncio.wait_for(test(followed), 20)

    asyncio.run(begin())


def _main(first: Revision) -> controller.Model:
    return controller.Model((first,), main=True)


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.01)


def test_new_weights_have_the_adapters_of_the_old_ones() -> None:
    async def test(followed: FollowedModels) -> None:
        await until(lambda: set(followed.pools.adapters()) == {"first"})  # the recipe's, which a gateway publishes
        await Directory(store("main")).publish(ROLE, "second@2", Entry("second", "/s", "2", 4, time.time()).tree())
        await until(lambda: set(followed.pools.adapters()) == {"first", "second"})
        old = followed.pools.main
        followed.apply(await followed.store.change(lambda now: now.update("main", revision("r1", endpoint))))
        starting = followed.pool("main", "r1")
        assert starting is not None and followed.pools.main is old
        await until(lambda: starting.adapters is not None and len(starting.adapters.all()) == 2)
        followed.apply(await followed.store.change(lambda now: now.ready("main", "r1", 2.0)))
        assert followed.pools.main is starting
        found = await followed.pools.target({"model": "second"}, None)
        assert found.pool is starting and found.adapter is not None and found.adapter.engine_name == "second@2"
        # One that is removed is removed for good: the recipe's adapters do not return with later weights.
        await Directory(store("main")).withdraw(ROLE, "first@1")
        followed.apply(await followed.store.change(lambda now: now.update("main", revision("r2", endpoint))))
        followed.apply(await followed.store.change(lambda now: now.ready("main", "r2", 3.0)))
        await until(lambda: set(followed.pools.adapters()) == {"second"})

    endpoint = spec()
    run(test, endpoint)


def test_a_further_model_has_adapters_of_its_own() -> None:
    async def test(followed: FollowedModels) -> None:
        own = replace(revision("a", endpoint), adapters=(Entry("tuned", "/t", "3", 4),))
        followed.apply(await followed.store.change(lambda now: now.add("small", own).ready("small", "a", 2.0)))
        await until(lambda: set(followed.pools.adapters()) == {"first", "tuned"})
        found = await followed.pools.target({"model": "tuned"}, None)
        assert found.pool.name == "small" and (await followed.pools.target({"model": "first"}, None)).pool.name == "main"
        # Removed and added again, it starts without what was loaded before.
        await Directory(store("small@a")).publish(ROLE, "late@4", Entry("late", "/l", "4", 4, time.time()).tree())
        await until(lambda: "late" in followed.pools.adapters())
        followed.apply(await followed.store.change(lambda now: now.remove("small").ended("small", "a")))
        again = replace(own, id="b")
        followed.apply(await followed.store.change(lambda now: now.add("small", again).ready("small", "b", 3.0)))
        await until(lambda: set(followed.pools.adapters()) == {"first", "tuned"})

    endpoint = spec()
    run(test, endpoint)


def test_engines_of_all_revisions_follow_one_directory_of_adapters() -> None:
    endpoint = spec()
    added = controller.Catalogue(1, {}).add("small", revision("a", endpoint)).ready("small", "a", 2.0)
    updated = added.update("small", revision("b", endpoint))
    specs = [controller.engine_specs(endpoint, "small", one)[1] for one in updated.models["small"].revisions]
    assert {one.adapters_directory for one in specs} == {store("small@a")} and len({one.directory for one in specs}) == 2
    main = controller.engine_specs(endpoint, "main", Revision("c", "/c", endpoint.section))[1]
    assert main.adapters_directory == store("main")


def test_models_do_not_inherit_the_main_models_adapters(tmp_path: Path) -> None:
    base, one = peft_folder.base(tmp_path / "base"), peft_folder.adapter(tmp_path / "one")
    (base / "tokenizer.json").write_text("{}")
    words = [f"adapters={{load: {{one: {one}}}}}", f"models.small.model={base}"]
    small = from_recipe.chosen(section(*words), "main")[0]
    assert small.adapters == () and small.section["adapters"] == section("adapters={}").model_dump()["adapters"] | {"roots": []}
    own = from_recipe.chosen(section(*words, f"models.small.adapters={{load: {{two: {one}}}}}"), "main")[0]
    assert own.adapters is not None and [entry.name for entry in own.adapters] == ["two"]
    for name in ("one", "main", "small"):
        with pytest.raises(UserError, match="name of a model or of another adapter"):
            from_recipe.chosen(section(*words, f"models.small.adapters={{load: {{{name}: {one}}}}}"), "main")
