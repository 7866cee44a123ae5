"""Routing by prefixes over real links, with stand-in replicas that announce what they have cached."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from gateway_alone import SECRET

from strata.serving.engine.request_context import RequestContext
from strata.serving.gateway import prefix_routing
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.gateway.prefix_routing import Prefix, PrefixRouting, prefix_of
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.routing.kv.expected_wait import Chosen
from strata.serving.routing.kv.prefix_log import PrefixLog
from strata.serving.transport.link import PREFIXES, Call, Server
from strata.serving.transport.peers import Peers

TEXT = "x" * 2000
BODY = {"prompt": TEXT, "max_tokens": 4}


class Replica:
    def __init__(self, name: str) -> None:
        self.name, self.log = name, PrefixLog()
        self.asked: list[dict[str, Any]] = []
        self.subscribed = 0
        self.refuses = False
        self.waiting: asyncio.Event | None = None  # requests are answered when it is set
        self.server = Server(self.handle, lambda: {"calls": self.server.calls, "healthy": True}, SECRET)

    async def handle(self, call: Call) -> None:
        if call.method == PREFIXES:
            if self.refuses:
                raise LookupError("no prefixes here")
            self.subscribed += 1
            subscription = self.log.subscribe()
            try:
                while True:
                    call.data(await subscription.next())
            finally:
                subscription.close()
                self.subscribed -= 1
        self.asked.append(call.meta)
        if self.waiting is not None:
            await self.waiting.wait()
        tree = json.loads(call.body)
        if tree.get("stream"):
            call.head({"status": 200, "type": "text/event-stream", "headers": {}})
            context = RequestContext(unsent=[1])
            call.data(context.pack_event("data: [DONE]\n\n"))
        else:
            call.head({"status": 200, "type": "application/json", "headers": {}})
            call.data(b"{}")
        call.end({"prompt_tokens": 500, "tokens": 1, "queued_s": 0.0, "prefilled": [500, 0.5]})


class Directory:
    def __init__(self, *replicas: Replica) -> None:
        self.replicas = {replica.name: replica for replica in replicas}

    async def names(self, role: str) -> set[str]:
        return set(self.replicas) if role == "decode" else set()

    async def entry(self, role: str, name: str) -> dict[str, Any] | None:
        return {"address": await self.replicas[name].server.listen("127.0.0.1"), "context": 64, "node": "here"}

    async def withdraw(self, role: str, name: str) -> None:
        pass


class Endpoint:
    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.routing = PrefixRouting(max_sequences=64)
        self.decode = Peers(directory, "decode", SECRET, poll_s=0.05, joined=self.routing.follow)  # type: ignore[arg-type]
        others = Peers(directory, "gateway", SECRET)  # type: ignore[arg-type]
        admission, telemetry = Admission(lambda: 100), Telemetry("tiny", "g")
        app = App("g", Pools(Pool(("tiny",), self.decode, None, admission, telemetry, routing=self.routing)), others)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")

    async def ask(self, path: str = "completions", **more: Any) -> tuple[str, str, str]:
        """Replica, cached tokens and reason of the answer."""
        response = await self.client.post(f"/v1/{path}", json=BODY | more if path == "completions" else more)
        assert response.status_code == 200, response.text
        name, cached, reason = response.headers["x-strata-replica"].split("; ")
        return name, cached.removeprefix("cached="), reason.removeprefix("reason=")

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not done():
                await asyncio.sleep(0.01)


def digests(tree: dict[str, Any] = BODY, salt: str = "") -> tuple[int, ...]:
    found = prefix_of("completions", tree, "tiny", salt)
    assert found is not None
    return found.digests


def run(test: Callable[[Endpoint], Awaitable[None]], *names: str) -> None:
    async def inside() -> None:
        endpoint = Endpoint(Directory(*map(Replica, names)))
        await endpoint.until(lambda: len(endpoint.decode.all()) == len(names))
        await asyncio.wait_for(test(endpoint), 20)
        await endpoint.client.aclose()

    asyncio.run(inside())


def replicas(endpoint: Endpoint) -> dict[str, Replica]:
    return endpoint.directory.replicas


def test_request_goes_to_the_replica_that_has_its_prefix() -> None:
    async def test(endpoint: Endpoint) -> None:
        assert (await endpoint.ask())[1:] == ("0", "new")
        for place, digest in enumerate(digests()):
            replicas(endpoint)["b"].log.add(digest, 128 * (place + 1))
        await endpoint.until(lambda: endpoint.routing.map.size == 3)
        for _ in range(5):
            assert await endpoint.ask() == ("b", "384", "prefix")
            assert await endpoint.ask(prompt=TEXT[:1100] + "y" * 900) == ("b", "256", "prefix")
        assert (await endpoint.ask(cache_salt="mine"))[1:] == ("0", "new")
        assert (await endpoint.ask("chat/completions", messages=[{"role": "user", "content": TEXT}]))[1:] == ("0", "new")
        replicas(endpoint)["b"].log.remove(digests()[-1])
        replicas(endpoint)["c"].log.add(digests()[-1], 400)
        await endpoint.until(lambda: len(endpoint.routing.map.cached_tokens(digests())) == 2)
        assert await endpoint.ask() == ("c", "400", "prefix")
        metrics = (await endpoint.client.get("/metrics")).text
        counted = [line for line in metrics.splitlines() if line.startswith("strata_serve_routed_total")]
        assert {line.split('reason="')[1].split('"')[0]: float(line.split()[-1]) for line in counted} == {
            "prefix": 11,
            "load": 0,
            "new": 3,
            "least-busy": 0,
        }

    run(test, "a", "b", "c")


def test_subscriptions_are_no_load() -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.until(lambda: all(replica.subscribed == 1 for replica in replicas(endpoint).values()))
        assert [peer.busy for peer in endpoint.decode.all()] == [0, 0]
        assert [replica.server.calls for replica in replicas(endpoint).values()] == [0, 0]

    run(test, "a", "b")


def test_prefixes_of_a_lost_replica_are_forgotten() -> None:
    async def test(endpoint: Endpoint) -> None:
        for name in "ab":
            replicas(endpoint)[name].log.add(digests()[0], 100)
        await endpoint.until(lambda: len(endpoint.routing.map.cached_tokens(digests())) == 2)
        lost = replicas(endpoint).pop("a")
        lost.server.close()
        await endpoint.until(lambda: len(endpoint.routing.map.cached_tokens(digests())) == 1 and not lost.subscribed)
        assert (await endpoint.ask())[0] == "b"
        replicas(endpoint).pop("b").server.close()
        await endpoint.until(lambda: endpoint.routing.map.size == 0)

    run(test, "a", "b")


def test_new_replica_is_followed_and_a_refused_subscription_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_routing, "RETRY_S", 0.02)

    async def test(endpoint: Endpoint) -> None:
        late = Replica("late")
        late.refuses = True
        late.log.add(digests()[1], 256)
        replicas(endpoint)["late"] = late
        await endpoint.until(lambda: len(endpoint.decode.all()) == 2)
        assert (await endpoint.ask())[1:] == ("0", "new")
        late.refuses = False
        await endpoint.until(lambda: endpoint.routing.map.size == 1)
        assert await endpoint.ask() == ("late", "256", "prefix")

    run(test, "a")


def test_hot_prefix_spreads_over_replicas() -> None:
    async def test(endpoint: Endpoint) -> None:
        replicas(endpoint)["a"].log.add(digests()[-1], 480)
        await endpoint.until(lambda: endpoint.routing.map.size == 1)
        answered = asyncio.Event()
        for replica in replicas(endpoint).values():
            replica.waiting = answered
        asked = [asyncio.ensure_future(endpoint.ask(stream=True)) for _ in range(40)]
        await endpoint.until(lambda: sum(len(each.asked) for each in replicas(endpoint).values()) == 40)
        answered.set()
        found = await asyncio.gather(*asked)
        by = {name: sum(each[0] == name for each in found) for name in "ab"}
        assert by["a"] > by["b"] > 0
        assert {reason for name, _, reason in found if name == "b"} == {"load"}

    run(test, "a", "b")


def test_replica_receives_the_salt_of_the_tenant() -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.ask()
        assert replicas(endpoint)["a"].asked[0]["cache_salt"] is None
        assert not set(digests(salt="t")) & set(digests())

    run(test, "a")


def test_prompts_are_queued_until_their_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(endpoint: Endpoint) -> None:
        routing, replica = endpoint.routing, replicas(endpoint)["a"]
        replica.waiting = asyncio.Event()
        asked = asyncio.ensure_future(endpoint.ask(stream=True))
        await endpoint.until(lambda: bool(replica.asked))
        assert routing._queued == {"a": 500}
        replica.waiting.set()
        await asked
        assert not routing._queued
        chosen = Chosen(endpoint.decode.all()[0], 400, "prefix")
        monkeypatch.setattr(prefix_routing, "MIN_PATIENCE_S", 0.01)
        monkeypatch.setattr(prefix_routing, "PATIENCE", 0.0)
        first, second = (routing.sent(chosen, Prefix((), 2400, False)) for _ in range(2))
        assert routing._queued == {"a": 400}
        second.done()
        second.done()
        assert routing._queued == {"a": 200}
        await endpoint.until(lambda: not routing._queued)  # the first token of an answer that is not streamed is not seen
        first.done()
        assert not routing._queued

    run(test, "a")


def test_tokens_are_estimated_by_the_bytes_of_earlier_prompts() -> None:
    async def test(endpoint: Endpoint) -> None:
        routing, prefix = endpoint.routing, Prefix((), 1000, False)
        assert routing.tokens(prefix) == 250
        for _ in range(200):
            routing.counted(prefix, 500)
        assert routing.tokens(prefix) == 500
        assert routing.tokens(Prefix((), 1000, of_ids=True)) == 125
        routing.counted(prefix, 0)
        assert routing.tokens(prefix) == 500

    run(test, "a")


def test_costs_are_measured_by_the_answers() -> None:
    async def test(endpoint: Endpoint) -> None:
        for _ in range(3):
            await endpoint.ask()
        assert endpoint.routing.meter.costs().token_s == pytest.approx(0.001)

    run(test, "a")
