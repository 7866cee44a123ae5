"""Prefill replicas that decode while no decode replica is up, and requests that wait for an engine.

The replicas are stand-ins; test_failover.py has real engines.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from strata.serving.engine.request_context import RequestContext
from strata.serving.gateway import http, readiness, relay
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.transport.link import SECRET_BYTES, Call, Server
from strata.serving.transport.peers import Peers

pytestmark = pytest.mark.slow

SECRET = os.urandom(SECRET_BYTES)
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "it"]
ALL = " ".join([*WORDS, "[DONE]"])


class Replica:
    """Generates WORDS, one per event, from the resumed position; dies after `dies_after` of them."""

    def __init__(self, name: str, dies_after: int | None = None) -> None:
        self.name, self.dies_after = name, dies_after
        self.asked: list[dict[str, Any]] = []
        self.server = Server(self.handle, lambda: {"calls": self.server.calls, "healthy": True}, SECRET)

    async def handle(self, call: Call) -> None:
        self.asked.append(call.meta)
        tree = json.loads(call.body)
        if tree["prompt"] == "fail":
            raise RuntimeError("the engine gave up on this request")
        context = RequestContext(resumed=tuple(call.meta.get("resumed", ())))
        streams = tree.get("stream") and tree["prompt"] != "refuse"
        if streams and not context.resumed:
            call.head({"status": 200, "type": "text/event-stream", "headers": {}})
        for count, word in enumerate([*WORDS, "[DONE]"][len(context.resumed) :] if streams else ()):
            if count == self.dies_after:
                self.server.close()
                await asyncio.sleep(60)
            context.unsent, context.finished = [WORDS.index(word)] if word in WORDS else [], word == "[DONE]"
            call.data(context.pack_event(f"data: {word}\n\n"))
            await asyncio.sleep(0.01)
        if not streams:
            status = 400 if tree["prompt"] == "refuse" else 200
            call.head({"status": status, "type": "application/json", "headers": {}})
            call.data(json.dumps({"code": status, "text": " ".join(WORDS)}).encode())
        call.end({"prompt_tokens": 3, "tokens": len(WORDS), "queued_s": 0.0})


class Directory:
    """Ray's key-value store, without Ray."""

    def __init__(self) -> None:
        self.roles: dict[str, dict[str, Any]] = {"decode": {}, "prefill": {}, "gateway": {}, readiness.WARM_UP: {}}

    async def publish(self, role: str, name: str, entry: dict[str, Any]) -> None:
        self.roles[role][name] = entry

    async def names(self, role: str) -> set[str]:
        return set(self.roles[role])

    async def entry(self, role: str, name: str) -> Any:
        return self.roles[role].get(name)

    async def withdraw(self, role: str, name: str) -> None:
        self.roles[role].pop(name, None)


class Endpoint:
    def __init__(self, directory: Directory, client: httpx.AsyncClient) -> None:
        self.directory, self.client = directory, client

    async def add(self, role: str, replica: Replica) -> Replica:
        address = await replica.server.listen("127.0.0.1")
        self.directory.roles[role][replica.name] = {"address": address, "context": 64, "node": "here"}
        await asyncio.sleep(0.7)  # until the gateway has found it
        return replica

    async def stream(self, **asked: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "x", "stream": True} | asked)


def run(test: Callable[[Endpoint], Awaitable[None]], to_zero: bool = False) -> None:
    async def inside() -> None:
        directory: Any = Directory()
        decode, prefill, others = (Peers(directory, role, SECRET) for role in ("decode", "prefill", "gateway"))
        ready = readiness.Readiness(decode, None if to_zero else prefill, None if to_zero else directory, to_zero=to_zero)
        telemetry = Telemetry("tiny", "g-1")
        standby = None if to_zero else prefill
        app = App("g-1", Pools(Pool(("tiny",), decode, standby, Admission(lambda: 100), telemetry, ready)), others)
        listener = http.listen("127.0.0.1", 0)
        server = http.server(app)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base, timeout=30) as client:
            await asyncio.wait_for(test(Endpoint(directory, client)), 30)
        server.should_exit = True
        await serving

    asyncio.run(inside())


def words(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return " ".join(line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: "))


def test_prefill_replica_continues_streams_of_the_last_decode_replica() -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.add("decode", Replica("d", dies_after=4))
        standby = await endpoint.add("prefill", Replica("p"))
        assert words(await endpoint.stream()) == ALL
        assert len(standby.asked[0]["resumed"]) in (3, 4)
        response = await endpoint.client.post("/v1/completions", json={"prompt": "x"})  # a new one, not streamed
        assert response.json()["text"] == " ".join(WORDS) and len(standby.asked) == 2
        assert "x-strata-waited" not in response.headers

    run(test)


def test_short_calls_wait_for_a_pool_at_zero_and_bring_it_back() -> None:
    async def test(endpoint: Endpoint) -> None:
        assert (await endpoint.client.get("/ready")).status_code == 200
        asked = [asyncio.ensure_future(endpoint.client.post("/tokenize", json={"prompt": "x"})) for _ in range(2)]

        async def queued() -> float:
            lines = (await endpoint.client.get("/metrics")).text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("strata_serve_requests_queued{"))

        while await queued() != 2:
            await asyncio.sleep(0.05)
        await endpoint.add("decode", Replica("d"))
        assert [(await one).status_code for one in asked] == [200, 200]

    run(test, to_zero=True)


def test_short_calls_are_refused_while_every_engine_is_lost() -> None:
    async def test(endpoint: Endpoint) -> None:
        assert (await endpoint.client.post("/tokenize", json={"prompt": "x"})).status_code == 503

    run(test)


def test_ready_requires_both_pools_and_the_warm_up() -> None:
    async def test(endpoint: Endpoint) -> None:
        async def obstacle() -> str | None:
            response = await endpoint.client.get("/ready")
            return None if response.status_code == 200 else response.json()["error"]["message"]

        async def becomes(expected: str | None) -> None:
            """Polls: the gateway notices a change of the directory or of a replica a moment later."""
            while await obstacle() != expected:
                await asyncio.sleep(0.05)

        assert await obstacle() == "No healthy decode replica is up."
        await endpoint.add("decode", Replica("d"))
        await becomes("No healthy prefill replica is up.")
        prefill = await endpoint.add("prefill", Replica("p"))
        await becomes("The warm-up has not passed yet.")
        await readiness.publish_warm_up(endpoint.directory)  # type: ignore[arg-type]
        await becomes(None)
        prefill.server.close()
        await becomes("No healthy prefill replica is up.")
        assert (await endpoint.client.get("/health")).status_code == 200

    run(test)


def test_prefill_replicas_do_not_decode_while_a_decode_replica_is_up() -> None:
    async def test(endpoint: Endpoint) -> None:
        standby = await endpoint.add("prefill", Replica("p"))
        assert (await endpoint.client.get("/health")).status_code == 200
        assert (await endpoint.client.get("/v1/models")).json()["data"][0]["max_model_len"] == 64
        assert words(await endpoint.stream()) == ALL and len(standby.asked) == 1
        decode = await endpoint.add("decode", Replica("d"))
        assert words(await endpoint.stream()) == ALL
        assert len(standby.asked) == 1 and len(decode.asked) == 1

    run(test)


def test_failed_request_is_retried_on_the_prefill_pool() -> None:
    async def test(endpoint: Endpoint) -> None:
        replicas = [await endpoint.add(role, Replica(role)) for role in ("decode", "prefill")]
        response = await endpoint.client.post("/v1/completions", json={"prompt": "fail"})
        assert response.status_code >= 400 and all(replica.asked for replica in replicas)

    run(test)


def test_response_header_has_the_waiting_time() -> None:
    async def test(endpoint: Endpoint) -> None:
        asked = asyncio.ensure_future(endpoint.client.post("/v1/completions", json={"prompt": "x"}))
        await asyncio.sleep(0.5)
        await endpoint.add("prefill", Replica("p"))
        seconds, _, why = (await asked).headers["x-strata-waited"].partition("; ")
        assert 0.3 < float(seconds) < 5 and why == "reason=no-engine"

    run(test)


def test_waiting_stream_begins_with_sse_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "KEEP_ALIVE_S", 0.2)

    async def test(endpoint: Endpoint) -> None:
        body = {"prompt": "x", "stream": True}
        async with endpoint.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200 and response.headers["content-type"] == "text/event-stream"
            assert "reason=no-engine" in response.headers["x-strata-waited"] and response.headers["x-request-id"]
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith(": waiting for a replica")
            await endpoint.add("decode", Replica("d"))
            rest = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
        assert " ".join(rest) == ALL

    run(test)


def test_comments_repeat_while_a_stream_waits_in_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "KEEP_ALIVE_S", 0.2)

    async def test(endpoint: Endpoint) -> None:
        await endpoint.add("decode", Replica("d", dies_after=4))
        asked = asyncio.ensure_future(endpoint.stream())
        await asyncio.sleep(0.9)  # the stream has lost its replica
        await endpoint.add("decode", Replica("e"))
        response = await asked
        assert words(response) == ALL and "x-strata-waited" not in response.headers, "it began without a wait"
        lines = [line for line in response.text.splitlines() if line]
        comments = [index for index, line in enumerate(lines) if line.startswith(": waiting for a replica since ")]
        assert len(comments) >= 3 and lines[comments[0] - 1].startswith("data: ")
        assert comments == list(range(comments[0], comments[0] + len(comments))), "no comment after the new replica's events"

    run(test)


def test_response_without_streaming_has_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "KEEP_ALIVE_S", 0.1)

    async def test(endpoint: Endpoint) -> None:
        asked = asyncio.ensure_future(endpoint.client.post("/v1/completions", json={"prompt": "x"}))
        await asyncio.sleep(0.4)
        await endpoint.add("decode", Replica("d"))
        response = await asked
        assert response.json()["text"] == " ".join(WORDS) and "reason=no-engine" in response.headers["x-strata-waited"]

    run(test)


def test_wait_for_an_engine_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "KEEP_ALIVE_S", 0.1)
    monkeypatch.setattr(relay, "REPLICA_WAIT_S", 0.5)

    async def test(endpoint: Endpoint) -> None:
        stream, plain = await asyncio.gather(
            endpoint.stream(), endpoint.client.post("/v1/completions", json={"prompt": "x", "stream": False})
        )
        assert plain.status_code == 503 and plain.headers["retry-after"] == "10"
        assert plain.json()["error"]["message"] == "No engine is up."
        error = json.loads(words(stream))["error"]
        assert error == plain.json()["error"] and ": waiting for a replica" in stream.text

    run(test)


def test_refusal_after_the_response_began_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "KEEP_ALIVE_S", 0.2)

    async def test(endpoint: Endpoint) -> None:
        asked = asyncio.ensure_future(endpoint.stream(prompt="refuse"))
        await asyncio.sleep(0.6)
        await endpoint.add("decode", Replica("d"))
        assert '"code": 400' in words(await asked)

    run(test)
