"""A gateway with the pools of two models, whose replicas are stand-ins."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from gateway_alone import SECRET, Directory, Replica

from strata.serving.api.requests import ApiError
from strata.serving.gateway import http
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.keys import Keys
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.gateway.suspects import Content
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.tenants.gate import Gate
from strata.serving.tenants.tenant import digest
from strata.serving.transport.link import Server
from strata.serving.transport.peers import Peers


@dataclass
class Two:
    client: httpx.AsyncClient
    pools: Pools
    main: Pool
    second: Pool
    replicas: dict[str, Replica]
    servers: dict[str, Server]
    changed: list[tuple[str, str, bytes]]
    gate: Gate | None

    async def complete(self, key: str = "", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return await self.client.post("/v1/completions", json={"prompt": "x"} | body, headers=headers)


@asynccontextmanager
async def two(tmp_path: Path, **tenants: Any) -> AsyncIterator[Two]:
    replicas, pools, servers = {}, {}, {}
    keys = gate = None
    if tenants:
        tree = {name: {"keys": [{"sha256": digest(name.encode()).hex()}]} | limits for name, limits in tenants.items()}
        (tmp_path / "tenants.yaml").write_text(json.dumps({"tenants": tree}))
        keys = Keys(tmp_path / "tenants.yaml", SECRET)
        gate = Gate(lambda: 4, 4, SECRET)
    for name in ("main", "second"):
        replica = replicas[name] = Replica()

        def server_of(handle: Any) -> Server:
            server = Server(handle, lambda: {"calls": server.calls, "healthy": True}, SECRET)
            return server

        servers[name] = server_of(replica.handle)
        directory: Any = Directory(await servers[name].listen("127.0.0.1"))
        decode = Peers(directory, "decode", SECRET, 0.02)
        queue = gate.open_queue(name, lambda: 4, 4) if gate is not None and name == "second" else None
        telemetry = Telemetry(name, "g", main=name == "main")
        key = "" if name == "main" else "second@1"
        pools[name] = Pool((name,), decode, None, Admission(lambda: 1), telemetry, queue=queue, key=key)
    found = Pools(pools["main"])
    found.set(pools["main"], {"second": pools["second"]}, {"chat": {"main": 1.0, "second": 1.0}}, ())
    changed: list[tuple[str, str, bytes]] = []

    async def admin(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        changed.append((method, path, body))
        if path.endswith("/none"):
            raise ApiError(404, "There is no such model.")
        return 202, b"{}"

    app = App("g", found, Peers(directory, "gateway", SECRET), keys, "here", gate=gate, model_admin=admin)
    listener = http.listen("127.0.0.1", 0)
    server = http.server(app)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=20) as client:
        while not (server.started and all(pool.decode.all() for pool in pools.values())):
            await asyncio.sleep(0.01)
        yield Two(client, found, pools["main"], pools["second"], replicas, servers, changed, gate)
    server.should_exit = True
    await serving
    for one in servers.values():
        one.close()


def run(tmp_path: Path, test: Callable[[Two], Awaitable[None]], **tenants: Any) -> None:
    async def inside() -> None:
        async with two(tmp_path, **tenants) as endpoint:
            await asyncio.wait_for(test(endpoint), 30)

    asyncio.run(inside())


def test_requests_go_to_the_pool_of_their_model(tmp_path: Path) -> None:
    async def test(endpoint: Two) -> None:
        assert (await endpoint.complete()).status_code == (await endpoint.complete(model="main")).status_code == 200
        assert len(endpoint.replicas["main"].metas) == 2 and not endpoint.replicas["second"].metas
        assert (await endpoint.complete(model="second")).status_code == 200
        assert len(endpoint.replicas["second"].metas) == 1 and "model" not in endpoint.replicas["second"].metas[0]
        lines = (await endpoint.client.get("/metrics")).text.splitlines()
        counted = [line for line in lines if line.startswith("strata_serve_requests_total{")]
        assert sorted(float(line.split()[-1]) for line in counted) == [1, 2] and 'model="second"' in "".join(counted)
        gateways = [line for line in lines if line.startswith("strata_serve_replicas{")]
        assert sum(float(line.split()[-1]) for line in gateways) == 1  # counted once, for the main model
        assert (await endpoint.complete(model="third")).status_code == 404

    run(tmp_path, test)


def test_an_alias_names_the_model_to_the_replica(tmp_path: Path) -> None:
    async def test(endpoint: Two) -> None:
        for user in range(16):
            assert (await endpoint.complete(model="chat", user=str(user))).status_code == 200
        asked = {name: {meta["model"] for meta in replica.metas} for name, replica in endpoint.replicas.items()}
        assert asked == {"main": {"main"}, "second": {"second"}}
        listed = (await endpoint.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["main", "second", "chat"] and listed[2]["root"] == "main"
        assert (await endpoint.client.get("/v1/models/chat")).json()["root"] == "main"

    run(tmp_path, test)


def test_readiness_of_each_model(tmp_path: Path) -> None:
    async def test(endpoint: Two) -> None:
        async def status(name: str | None) -> int:
            return (await endpoint.client.get("/ready", params={} if name is None else {"model": name})).status_code

        assert [await status(name) for name in (None, "main", "second", "chat")] == [200] * 4
        missing = await endpoint.client.get("/ready", params={"model": "third"})
        assert missing.status_code == 404 and "second" not in missing.text
        endpoint.servers["second"].close()
        while await status("second") != 503:
            await asyncio.sleep(0.02)
        assert [await status(name) for name in (None, "main", "chat")] == [200, 200, 503]
        endpoint.pools.set(endpoint.main, {}, {}, (endpoint.second,))  # it starts, or ends
        assert await status("second") == 503

    run(tmp_path, test)


def test_a_full_pool_refuses_only_its_own_requests(tmp_path: Path) -> None:
    async def test(endpoint: Two) -> None:
        with endpoint.second.admission.admitted(1):
            assert (await endpoint.complete(model="second")).status_code == 429
            assert (await endpoint.complete(model="main")).status_code == 200

    run(tmp_path, test)


def test_a_request_counts_for_its_pool_until_its_end(tmp_path: Path) -> None:
    async def test(endpoint: Two) -> None:
        body = {"prompt": "x", "model": "second", "stream": True, "events": 50, "rate": 100}
        async with endpoint.client.stream("POST", "/v1/completions", json=body) as response:
            events = response.aiter_lines()
            assert await anext(events)
            assert (endpoint.main.requests, endpoint.second.requests) == (0, 1)
            # The pool is replaced: new requests go to the other one, this stream stays.
            endpoint.pools.set(endpoint.main, {"second": endpoint.main}, {}, (endpoint.second,))
            assert (await endpoint.complete(model="second")).status_code == 200 and endpoint.replicas["main"].metas
            assert [line async for line in events if line][-1] == "data: [DONE]"
        assert endpoint.second.requests == 0

    run(tmp_path, test)


def test_the_admin_api_refuses_tenants(tmp_path: Path) -> None:
    async def test(endpoint: Two) -> None:
        for method, path in (
            ("GET", "/-/models"),
            ("POST", "/-/models"),
            ("DELETE", "/-/models/second"),
            ("POST", "/-/aliases/x"),
        ):
            sent = {"json": {}} if method == "POST" else {}
            assert (await endpoint.client.request(method, path, **sent)).status_code == 401  # type: ignore[arg-type]
            refused = await endpoint.client.request(method, path, headers={"authorization": "Bearer a"}, **sent)  # type: ignore[arg-type]
            assert refused.status_code == 403 and "'a' may not use the admin API" in refused.text
        assert not endpoint.changed
        own = {"authorization": "Bearer boss"}
        assert (await endpoint.client.get("/-/models", headers=own)).status_code == 202
        assert (await endpoint.client.post("/-/models", headers=own, content=b"{}")).status_code == 415
        assert (await endpoint.client.post("/-/models", headers=own, json={"name": "x"})).status_code == 202
        missing = await endpoint.client.delete("/-/models/none", headers=own)
        assert missing.status_code == 404 and missing.json()["error"]["message"] == "There is no such model."
        assert [(method, path) for method, path, _ in endpoint.changed] == [
            ("GET", "/-/models"),
            ("POST", "/-/models"),
            ("DELETE", "/-/models/none"),
        ]

    run(tmp_path, test, a={}, boss={"admin": True})


def test_tenants_use_their_models_and_a_queue_of_each(tmp_path: Path) -> None:
    async def test(endpoint: Two) -> None:
        assert (await endpoint.complete("a", model="second")).status_code == 200
        refused = await endpoint.complete("a", model="main")
        assert refused.status_code == 403 and (await endpoint.complete("a", model="chat")).status_code == 403
        assert (await endpoint.complete("b", model="chat")).status_code == 200
        cards = (await endpoint.client.get("/v1/models", headers={"authorization": "Bearer a"})).json()["data"]
        assert [card["id"] for card in cards] == ["second"]
        assert endpoint.gate is not None and "a" in endpoint.gate.queue_load()["second"]
        # A limit is that of the tenant, whatever the model.
        assert [(await endpoint.complete("c", model=model)).status_code for model in ("main", "second", "main")] == [
            200,
            200,
            429,
        ]

    run(tmp_path, test, a={"models": ["second"]}, b={}, c={"requests_per_minute": 2})


def test_models_do_not_share_verdicts() -> None:
    body = b'{"prompt": "x"}'
    assert Content("chat", body).digest == Content("chat", body).digest != Content("chat", body, "second@1").digest
