"""Registry of adapters on a directory in memory and on replicas that listen on real links."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from strata.serving.adapters.entry import Entry, store
from strata.serving.adapters.registry import INSPECT, LOAD, Adapters
from strata.serving.api.requests import ApiError
from strata.serving.transport.directory import Directory
from strata.serving.transport.link import SECRET_BYTES, Call, Server
from strata.serving.transport.peers import Peers

from ..transport import memory_store

SECRET = bytes(SECRET_BYTES)


@pytest.fixture(autouse=True)
def kv(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    return memory_store.replace(monkeypatch)


@dataclass
class Replica:
    """Answers the registry's calls. `revisions` of folders; others are refused."""

    revisions: dict[str, str] = field(default_factory=lambda: {"/a": "1", "/b": "2"})
    loaded: list[str] = field(default_factory=list)
    fails: bool = False

    async def handle(self, call: Call) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        if call.method == INSPECT:
            folder = call.meta["folder"]
            if folder not in self.revisions:
                call.end({"refused": f"There is no folder {folder}."})
            else:
                call.end({"folder": folder, "revision": self.revisions[folder], "rank": 4})
        elif call.method == LOAD:
            entry = Entry(**call.meta)
            if entry.folder in self.revisions:
                self.loaded.append(entry.engine_name)
                call.end({})
            else:
                call.end({"refused": f"{entry.folder} does not fit."})


def run(test: Callable[[Peers, list[Replica]], Awaitable[None]], replicas: int = 2) -> None:
    async def begin() -> None:
        machines, servers = [Replica() for _ in range(replicas)], []
        for number, machine in enumerate(machines):
            servers.append(Server(machine.handle, dict, SECRET))
            await Directory("m").publish("decode", str(number), {"address": await servers[-1].listen("127.0.0.1")})
        peers = Peers(Directory("m"), "decode", SECRET, poll_s=0.01)
        async with asyncio.timeout(20):
            while len(peers.all()) < replicas:
                await asyncio.sleep(0.01)
            await test(peers, machines)
        for server in servers:
            server.close()

    asyncio.run(begin())


def registry(peers: Peers, *seed: Entry, poll_s: float = 60.0) -> Adapters:
    return Adapters(Directory(store("m")), peers.all, lambda: ("m",), seed, poll_s)


async def refused(doing: Awaitable[Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await doing
    return caught.value


def test_an_adapter_is_loaded_everywhere_before_it_is_listed() -> None:
    async def test(peers: Peers, replicas: list[Replica]) -> None:
        one, other = registry(peers), registry(peers)
        entry = await one.add("tuned", "/a")
        assert (entry.engine_name, entry.folder, entry.rank) == ("tuned@1", "/a", 4)
        assert [replica.loaded for replica in replicas] == [["tuned@1"]] * 2
        assert one.get("tuned") == entry and one.all() == [entry]
        assert other.get("tuned") is None and await other.find("tuned") == entry  # it had not polled since
        assert await other.find("absent") is None and await other.find("not@a@name") is None
        await other.remove("tuned")
        assert other.get("tuned") is None and one.get("tuned") == entry
        await one.read()
        assert one.all() == []
        assert (await refused(one.remove("tuned"))).status == 404

    run(test)


def test_gateways_poll() -> None:
    async def test(peers: Peers, replicas: list[Replica]) -> None:
        one, other = registry(peers), registry(peers, poll_s=0.01)
        await one.add("tuned", "/a")
        while other.get("tuned") is None:
            await asyncio.sleep(0.01)
        await one.remove("tuned")
        while other.get("tuned") is not None:
            await asyncio.sleep(0.01)

    run(test, replicas=1)


def test_a_taken_name_is_refused_and_a_new_revision_replaces_the_old(kv: dict[bytes, bytes]) -> None:
    async def test(peers: Peers, replicas: list[Replica]) -> None:
        adapters = registry(peers)
        first = await adapters.add("tuned", "/a")
        assert await adapters.add("tuned", "/a") == first  # the same content: a request that was sent again
        assert "loaded already" in str(await refused(adapters.add("tuned", "/b")))
        second = await adapters.add("tuned", "/b", replace=True)
        assert second.engine_name == "tuned@2" and adapters.all() == [second]
        assert [key for key in kv if b"/adapter/" in key] == [b"serve/m.adapters/adapter/tuned@2"]

    run(test, replicas=1)


@pytest.mark.parametrize("name", ["m", "", "a@1", "a b", "/a", "a" * 129, "a\n"])
def test_wrong_names_are_refused(name: str) -> None:
    async def test(peers: Peers, replicas: list[Replica]) -> None:
        assert (await refused(registry(peers).add(name, "/a"))).status == 400

    run(test, replicas=1)


def test_refusals_of_replicas_reach_the_caller_and_nothing_is_listed(kv: dict[bytes, bytes]) -> None:
    async def test(peers: Peers, replicas: list[Replica]) -> None:
        error = await refused(registry(peers).add("tuned", "/c"))
        assert error.status == 400 and "no folder /c" in str(error) and not [key for key in kv if b"/adapter/" in key]

    run(test)


def test_a_replica_that_fails_loads_later() -> None:
    async def test(peers: Peers, replicas: list[Replica]) -> None:
        replicas[0].fails = True
        assert await registry(peers).add("tuned", "/a")
        assert replicas[1].loaded == ["tuned@1"]
        replicas[1].fails = True
        assert (await refused(registry(peers).add("other", "/a"))).status == 503

    run(test)


def test_adapters_of_the_recipe_are_published_once() -> None:
    async def test(peers: Peers, replicas: list[Replica]) -> None:
        seed = Entry("seeded", "/a", "1", 4, 5.0)
        one = registry(peers, seed, poll_s=0.01)
        while one.get("seeded") is None:
            await asyncio.sleep(0.01)
        await one.remove("seeded")
        other = registry(peers, seed, poll_s=0.01)  # of a gateway that was started again
        await asyncio.sleep(0.1)
        assert other.all() == []

    run(test, replicas=1)


def test_replicas_of_new_weights_load_every_adapter_or_refuse_it() -> None:
    async def test(peers: Peers, replicas: list[Replica]) -> None:
        adapters = registry(peers)
        await adapters.load_all()
        await adapters.add("tuned", "/a")
        await adapters.add("other", "/b")
        replicas[0].loaded.clear()
        await registry(peers).load_all()
        assert replicas[0].loaded == ["tuned@1", "other@2"]
        del replicas[0].revisions["/b"]
        assert "The adapter 'other' cannot be carried over: /b does not fit." in str(await refused(adapters.load_all()))

    run(test, replicas=1)
