"""Routes of a gateway for adapters, with a replica that stands in."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata.platform.errors import UserError
from strata.serving.adapters import api
from strata.serving.adapters.entry import Entry
from strata.serving.api.requests import ApiError
from strata.serving.catalogue import commands
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.tenants.tenant import Caller, Limits, Tenant


class Registry:
    """Stands in for Adapters. `late` is found only by reading again."""

    def __init__(self, *names: str, late: str = "") -> None:
        self.entries = {name: Entry(name, f"/adapters/{name}", "1", 4, 7.0) for name in names}
        self._late = late

    def get(self, name: str) -> Entry | None:
        return self.entries.get(name)

    def all(self) -> list[Entry]:
        return list(self.entries.values())

    async def find(self, name: str) -> Entry | None:
        if name == self._late:
            self.entries[name] = Entry(name, "/late", "1", 4)
        return self.get(name)

    async def add(self, name: str, folder: str, replace: bool = False) -> Entry:
        self.entries[name] = Entry(name, folder, "2" if replace else "1", 4)
        return self.entries[name]

    async def remove(self, name: str) -> Entry:
        if name not in self.entries:
            raise ApiError(404, f"There is no adapter '{name}'.")
        return self.entries.pop(name)


class NoPeers:
    def least_busy(self, without: frozenset[str] = frozenset()) -> None:
        return None

    def all(self) -> list[Any]:
        return []


def pool(name: str, registry: Registry | None) -> Pool:
    nothing: Any = NoPeers()
    return Pool((name,), nothing, None, None, None, adapters=registry, key=name)  # type: ignore[arg-type]


def run(test: Callable[[Pools, Registry], Awaitable[None]]) -> None:
    async def begin() -> None:
        registry = Registry("tuned", late="late")
        pools = Pools(pool("main", registry))
        pools.set(
            pools.main, {"other": pool("other", Registry("theirs")), "plain": pool("plain", None)}, {"alias": {"main": 1}}, ()
        )
        await test(pools, registry)

    asyncio.run(begin())


async def refused(doing: Awaitable[Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await doing
    return caught.value


def test_an_adapter_is_a_model_of_its_pool() -> None:
    async def test(pools: Pools, registry: Registry) -> None:
        assert pools.names() == ("main", "other", "plain", "alias", "tuned", "theirs")
        target = await pools.target({"model": "tuned"}, None)
        assert (target.pool, target.model, target.adapter) == (pools.main, "tuned", registry.get("tuned"))
        assert (target.space, target.suspects) == ("tuned@1", "main/tuned@1")
        assert (await pools.target({"model": "theirs"}, None)).pool.name == "other"
        assert (await pools.target({"model": "late"}, None)).adapter == registry.get("late")
        assert (await pools.target({}, None)).adapter is None
        card = pools.card("tuned")
        assert (card["id"], card["parent"], card["created"]) == ("tuned", "main", 7)
        for wrong in ("absent", 3, ["tuned"]):
            assert (await refused(pools.target({"model": wrong}, None))).status == 404

    run(test)


def test_tenants_use_the_adapters_that_they_may() -> None:
    async def test(pools: Pools, registry: Registry) -> None:
        limited = Caller(Tenant("a", Limits(models=("tuned",))), "1")
        assert pools.names(limited) == ("tuned",)
        assert (await pools.target({"model": "tuned"}, limited)).model == "tuned"
        assert (await refused(pools.target({"model": "theirs"}, limited))).status == 403
        await pools.require("tuned", limited)
        assert (await refused(pools.require("theirs", limited))).status == 404

    run(test)


def test_changes() -> None:
    async def change(pools: Pools, path: str, **tree: Any) -> str:
        return await pools.change_adapter(api.read(path, tree))

    async def test(pools: Pools, registry: Registry) -> None:
        text = await change(pools, api.LOAD_ROUTE, lora_name="new", lora_path="/x", load_inplace=True)
        assert text == "Success: LoRA adapter 'new' added successfully." and registry.entries["new"].revision == "2"
        await change(pools, api.LOAD_ROUTE, lora_name="there", lora_path="/x", model="other")
        assert "there" in pools.names() and "there" not in registry.entries
        await change(pools, api.UNLOAD_ROUTE, lora_name="there")
        assert "there" not in pools.names()
        for status, tree in (
            (400, {"lora_name": "other", "lora_path": "/x"}),  # a model
            (400, {"lora_name": "alias", "lora_path": "/x"}),
            (400, {"lora_name": "theirs", "lora_path": "/x"}),  # of another model
            (400, {"lora_name": "x", "lora_path": "/x", "model": "plain"}),
            (404, {"lora_name": "x", "lora_path": "/x", "model": "absent"}),
            (400, {"lora_name": "x"}),
            (400, {"lora_name": "", "lora_path": "/x"}),
            (400, {"lora_name": ["x"], "lora_path": "/x"}),
            (400, {"lora_name": "x", "lora_path": "/x", "load_inplace": 1}),
            (400, {"lora_name": "x", "lora_path": "/x", "other": 1}),
        ):
            assert (await refused(change(pools, api.LOAD_ROUTE, **tree))).status == status, tree
        assert (await refused(change(pools, api.UNLOAD_ROUTE, lora_name="absent"))).status == 404

    run(test)


def test_routes_over_http() -> None:
    from gateway_in_process import running

    async def test() -> None:
        async with running() as gateway:
            body = {"lora_name": "x", "lora_path": "/x"}
            answer = await gateway.client.post("/v1/load_lora_adapter", json=body)
            assert answer.status_code == 400 and "started without adapters" in answer.text
            assert (await gateway.client.post("/v1/load_lora_adapter", content="{}")).status_code == 415
            assert (await gateway.client.get("/v1/load_lora_adapter")).status_code == 405
            async with httpx.AsyncClient(base_url=gateway.client.base_url, headers={"host": "evil.example"}) as page:
                assert (await page.post("/v1/load_lora_adapter", json=body)).status_code == 403

    asyncio.run(test())


def test_the_command_names_the_model_of_an_adapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(commands, "_send", lambda url, method, path, tree=None: sent.append((path, tree)) or {})
    commands.models_add("tuned", adapter=tmp_path)
    commands.models_add("tuned", adapter=tmp_path, on="small")
    body = {"lora_name": "tuned", "lora_path": str(tmp_path)}
    assert sent == [(api.LOAD_ROUTE, body), (api.LOAD_ROUTE, body | {"model": "small"})]
    with pytest.raises(UserError, match="--on names the model"):
        commands.models_add("tuned", on="small")
