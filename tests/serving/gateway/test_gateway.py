"""Responses of the gateway when a replica is lost, is slow, or refuses.

The replicas are stand-ins; test_failover.py has real engines.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import span_collector
from span_collector import attributes

from strata.serving.engine.request_context import RequestContext
from strata.serving.gateway import connection, http
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.keys import Keys
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.transport.link import SECRET_BYTES, Call, Server
from strata.serving.transport.peers import Peers

pytestmark = pytest.mark.slow

SECRET = os.urandom(SECRET_BYTES)
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "from", "it"]


class Directory:
    """Ray's key-value store, without Ray."""

    def __init__(self) -> None:
        self.replicas: dict[str, dict[str, Any]] = {}

    async def names(self, role: str) -> set[str]:
        return set(self.replicas) if role == "decode" else set()

    async def entry(self, role: str, name: str) -> dict[str, Any] | None:
        return self.replicas.get(name)

    async def withdraw(self, role: str, name: str) -> None:
        self.replicas.pop(name, None)


class Replica:
    """Generates WORDS, one per event, from the resumed position; dies after `dies_after` words."""

    def __init__(self, name: str, dies_after: int | None = None, pause_s: float = 0.0, node: str = "here") -> None:
        self.name, self.dies_after, self.pause_s, self.node = name, dies_after, pause_s, node
        self.cancelled = 0
        self.asked: list[dict[str, Any]] = []
        self.healthy = True
        self.server = Server(self.handle, self.load, SECRET)

    def load(self) -> dict[str, Any]:
        return {"calls": self.server.calls, "healthy": self.healthy}

    async def handle(self, call: Call) -> None:
        try:
            await self.generate(call)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def generate(self, call: Call) -> None:
        if call.method == "metrics":
            call.head({"status": 200, "type": "text/plain"})
            call.data(f'# TYPE exported_by gauge\nexported_by{{name="{self.name}"}} 1\n'.encode())
            call.end({})
            return
        self.asked.append(call.meta)
        tree = json.loads(call.body)
        if tree.get("prompt") == "fail":
            raise RuntimeError("the engine gave up on this request")
        context = RequestContext(resumed=tuple(call.meta["resumed"]))
        if tree.get("prompt") == "refuse":
            call.head({"status": 400, "type": "application/json", "headers": {}})
            call.data(json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": 400}}).encode())
            call.end({})
            return
        if tree.get("stream") and not context.resumed:
            call.head({"status": 200, "type": "text/event-stream", "headers": {"x-strata-prefill": f"local; reason={self.name}"}})
        for count, word in enumerate(WORDS[len(context.resumed) :]):
            if count == self.dies_after:
                self.server.close()
                await asyncio.sleep(60)
            await asyncio.sleep(self.pause_s)
            if tree.get("stream"):
                context.unsent, context.finished = [WORDS.index(word)], word == WORDS[-1]
                call.data(context.pack_event(f"data: {word}\n\n"))
        if tree.get("stream"):
            call.data(context.pack_event("data: [DONE]\n\n"))
        else:
            call.head({"status": 200, "type": "application/json", "headers": {}})
            call.data(json.dumps({"text": " ".join(WORDS)}).encode())
        call.end({"prompt_tokens": 3, "tokens": len(WORDS), "queued_s": 0.0})


class Endpoint:
    def __init__(self, directory: Directory, app: App, client: httpx.AsyncClient) -> None:
        self.directory, self.app, self.client = directory, app, client

    async def add(self, replica: Replica) -> Replica:
        address = await replica.server.listen("127.0.0.1")
        self.directory.replicas[replica.name] = {"address": address, "context": 64, "node": replica.node}
        return replica

    async def words(self, **asked: Any) -> str:
        response = await self.client.post("/v1/completions", json={"prompt": "x", "stream": True} | asked)
        assert response.status_code == 200, response.text
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        return " ".join(events)

    async def metric(self, name: str) -> float:
        text = (await self.client.get("/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@asynccontextmanager
async def running(capacity: int = 100, keys: Keys | None = None) -> AsyncIterator[Endpoint]:
    directory = Directory()
    decode, others = Peers(directory, "decode", SECRET), Peers(directory, "gateway", SECRET)  # type: ignore[arg-type]
    main = Pool(("tiny",), decode, None, Admission(lambda: capacity), Telemetry("tiny", "g-1"))
    app = App("g-1", Pools(main), others, keys, "here")
    listener = http.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = http.server(app)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        while not server.started:
            await asyncio.sleep(0.01)
        yield Endpoint(directory, app, client)
    server.should_exit = True
    await serving


def run(test: Callable[[Endpoint], Awaitable[None]], capacity: int = 100, keys: Keys | None = None) -> None:
    async def inside() -> None:
        async with running(capacity, keys) as endpoint:
            await asyncio.wait_for(test(endpoint), 30)

    asyncio.run(inside())


ALL = " ".join([*WORDS, "[DONE]"])


def test_health_follows_the_engine_not_the_replica_process() -> None:
    """A replica outlives its engine for a while, and cannot answer then."""

    async def test(endpoint: Endpoint) -> None:
        async def becomes(status: int) -> None:
            while (await endpoint.client.get("/health")).status_code != status:
                await asyncio.sleep(0.05)

        first = await endpoint.add(Replica("a"))
        await becomes(200)
        first.healthy = False
        await becomes(503)
        assert "healthy engine" in (await endpoint.client.get("/-/healthz")).json()["error"]["message"]
        await endpoint.add(Replica("b"))
        await becomes(200)

    run(test)


def test_ready_without_a_warm_up_requires_only_the_engine() -> None:
    async def test(endpoint: Endpoint) -> None:
        refused = await endpoint.client.get("/ready")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["message"] == "No healthy decode replica is up."
        await endpoint.add(Replica("a"))
        await becomes_ready(endpoint)
        assert (await endpoint.client.get("/ready")).json() == {"status": "ready", "model": "tiny"}
        assert (await endpoint.client.post("/ready")).status_code == 405

    run(test)


async def becomes_ready(endpoint: Endpoint) -> None:
    while (await endpoint.client.get("/ready")).status_code != 200:
        await asyncio.sleep(0.05)


def test_stream_continues_on_another_replica() -> None:
    async def test(endpoint: Endpoint) -> None:
        first = await endpoint.add(Replica("a", dies_after=4, pause_s=0.01))
        await asyncio.sleep(0.7)
        second = await endpoint.add(Replica("b"))
        assert await endpoint.words() == ALL
        assert len(first.asked) == 1 and len(second.asked[0]["resumed"]) in (3, 4)  # its last words may have died with it
        assert await endpoint.metric('strata_serve_migrations_total{model="tiny",outcome="continued"') == 1

    run(test)


def test_stream_that_cannot_continue_ends_with_an_error() -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.add(Replica("a", dies_after=4, pause_s=0.01))
        answer = await endpoint.words(seed=3, temperature=1.0)
        error = json.loads(answer[answer.index("{") :])["error"]
        assert (
            error["code"] == 503 and "sampling with a seed" in error["message"] and "Send the request again" in error["message"]
        )
        assert await endpoint.metric('strata_serve_migrations_total{model="tiny",outcome="refused"') == 1

    run(test)


def test_unstreamed_request_is_retried() -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.add(Replica("a", dies_after=4))
        await asyncio.sleep(0.7)
        await endpoint.add(Replica("b"))
        response = await endpoint.client.post("/v1/completions", json={"prompt": "x", "n": 4})
        assert response.json() == {"text": " ".join(WORDS)}
        assert await endpoint.metric("strata_serve_retries_total") == 1

    run(test)


def test_request_fails_after_four_lost_replicas() -> None:
    async def test(endpoint: Endpoint) -> None:
        for name in "abcd":
            await endpoint.add(Replica(name, dies_after=0))
        await asyncio.sleep(0.7)
        response = await endpoint.client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503 and response.headers["retry-after"]
        assert "failed 4 times" in response.json()["error"]["message"]

    run(test)


def test_request_that_its_only_replica_cannot_answer_fails() -> None:
    async def test(endpoint: Endpoint) -> None:
        replica = await endpoint.add(Replica("a"))
        response = await endpoint.client.post("/v1/completions", json={"prompt": "fail"})
        assert response.status_code == 503 and len(replica.asked) == 4

    run(test)


def test_requests_wait_for_the_first_replica() -> None:
    async def test(endpoint: Endpoint) -> None:
        assert (await endpoint.client.get("/health")).status_code == 503
        asked = asyncio.ensure_future(endpoint.words())
        await asyncio.sleep(0.2)
        await endpoint.add(Replica("a"))
        assert await asked == ALL
        assert (await endpoint.client.get("/health")).status_code == 200

    run(test)


def test_draining_replica_keeps_its_stream_and_receives_no_new_one() -> None:
    async def test(endpoint: Endpoint) -> None:
        first = await endpoint.add(Replica("a", pause_s=0.15))
        running = asyncio.ensure_future(endpoint.words())
        while not first.asked:
            await asyncio.sleep(0.01)
        second = await endpoint.add(Replica("b"))
        await endpoint.directory.withdraw("decode", "a")
        await asyncio.sleep(0.7)
        assert await asyncio.gather(*(endpoint.words() for _ in range(4))) == [ALL] * 4
        assert len(first.asked) == 1 and len(second.asked) == 4
        assert not running.done()
        assert await running == ALL and first.cancelled == 0
        assert await endpoint.metric("strata_serve_migrations_total") == 0

    run(test)


def test_stream_of_a_replica_that_did_not_drain_in_time_continues_on_another() -> None:
    async def test(endpoint: Endpoint) -> None:
        first = await endpoint.add(Replica("a", pause_s=0.1))
        running = asyncio.ensure_future(endpoint.words())
        while not first.asked:
            await asyncio.sleep(0.01)
        second = await endpoint.add(Replica("b"))
        await endpoint.directory.withdraw("decode", "a")
        await asyncio.sleep(0.7)
        first.server.close()  # as if Ray Serve had killed it at its deadline
        assert await running == ALL
        assert 0 < len(second.asked[0]["resumed"]) < len(WORDS)

    run(test)


def test_requests_are_routed_to_the_replica_with_the_fewest() -> None:
    async def test(endpoint: Endpoint) -> None:
        replicas = [await endpoint.add(Replica(name, pause_s=0.02)) for name in "ab"]
        await asyncio.sleep(0.7)
        await asyncio.gather(*(endpoint.words() for _ in range(8)))
        assert [len(replica.asked) for replica in replicas] == [4, 4]

    run(test)


def test_client_disconnect_cancels_the_call() -> None:
    async def test(endpoint: Endpoint) -> None:
        replica = await endpoint.add(Replica("a", pause_s=0.2))
        async with endpoint.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            async for _ in response.aiter_lines():
                break
        await asyncio.sleep(0.3)
        assert replica.cancelled == 1
        assert await endpoint.metric("strata_serve_client_disconnects_total") == 1

    run(test)


def test_requests_beyond_capacity_receive_retry_after() -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.add(Replica("a", pause_s=0.05))
        asked = [asyncio.ensure_future(endpoint.words()) for _ in range(2)]
        await asyncio.sleep(0.9)
        response = await endpoint.client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert await asyncio.gather(*asked) == [ALL, ALL]
        assert await endpoint.words() == ALL

    run(test, capacity=2)


def test_refusal_of_a_replica_is_forwarded() -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.add(Replica("a"))
        response = await endpoint.client.post("/v1/completions", json={"prompt": "refuse", "stream": True})
        assert response.status_code == 400 and response.json()["error"]["message"] == "no"

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404), ("DELETE", "/health", 405)]
)
def test_unknown_routes_and_methods(method: str, path: str, status: int) -> None:
    async def test(endpoint: Endpoint) -> None:
        response = await endpoint.client.request(method, path)
        assert response.status_code == status and response.json()["error"]["code"] == status

    run(test)


def test_request_id_of_the_client_is_returned() -> None:
    async def test(endpoint: Endpoint) -> None:
        replica = await endpoint.add(Replica("a"))
        await asyncio.sleep(0.7)
        for sent in ("order-17", 'a b;c="d"', "x" * 512):
            named = {"x-request-id": sent}
            answers = [
                await endpoint.client.post("/v1/completions", json={"prompt": "x", "stream": True}, headers=named),
                await endpoint.client.post("/v1/completions", json={"prompt": "x"}, headers=named),
                await endpoint.client.post("/v1/completions", json={"prompt": "refuse"}, headers=named),
                await endpoint.client.post("/v1/completions", content=b"{", headers=named),
                await endpoint.client.post("/v1/nothing", headers=named),
                *[await endpoint.client.get(path, headers=named) for path in ("/health", "/metrics", "/v1/models")],
            ]
            assert [answer.headers.get_list("x-request-id") for answer in answers] == [[sent]] * len(answers)
        within = [meta["request_id"] for meta in replica.asked]
        assert len(set(within)) == 9 and not {"order-17", "x" * 512} & set(within), "no client chooses an engine's ids"

    run(test)


def test_missing_or_invalid_request_id_is_replaced() -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.add(Replica("a"))
        for sent in (None, b"", b"x" * 513, "é".encode(), b"a\tb"):
            named = {} if sent is None else {b"x-request-id": sent}
            answer = await endpoint.client.post("/v1/completions", json={"prompt": "x"}, headers=named)
            assert answer.status_code == (400 if sent else 200)
            assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
            assert not sent or "x-request-id" in answer.json()["error"]["message"]

    run(test)


def test_endless_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_S", 0.3)

    async def test(endpoint: Endpoint) -> None:
        host, port = endpoint.client.base_url.host, endpoint.client.base_url.port
        slow, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nx-slow: ")
        assert b"408 Request Timeout" in await asyncio.wait_for(slow.read(), 5)
        large, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\nx-large: " + b"a" * 100_000)
        assert b"431 Request Header Fields Too Large" in await asyncio.wait_for(large.read(), 5)

    run(test)


def test_node_scope_has_only_the_series_of_the_node() -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.add(Replica("a", node="here"))
        await endpoint.add(Replica("b", node="elsewhere"))
        await asyncio.sleep(0.7)
        everybody, node = [(await endpoint.client.get(path)).text for path in ("/metrics", "/metrics?scope=node")]
        assert [name for name in ("a", "b") if f'exported_by{{name="{name}"}}' in everybody] == ["a", "b"]
        assert [name for name in ("a", "b") if f'exported_by{{name="{name}"}}' in node] == ["a"]
        assert 'replica="g-1"' in node

    run(test)


def test_key_file_changes_apply_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "keys"

    async def status(endpoint: Endpoint, path: str, key: str | None) -> int:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return (await endpoint.client.get(path, headers=headers)).status_code

    async def test(endpoint: Endpoint) -> None:
        await endpoint.add(Replica("a"))
        await asyncio.sleep(0.7)
        assert await status(endpoint, "/v1/models", "one") == 401, "a file that is missing lets nobody in"
        file.write_text("one\n\n two \n")
        assert [await status(endpoint, "/v1/models", key) for key in ("one", "two", "three", None)] == [200, 200, 401, 401]
        assert [await status(endpoint, path, None) for path in ("/health", "/ready", "/-/healthz", "/metrics")] == [200] * 4
        refused = await endpoint.client.post("/v1/completions", json={"prompt": "x"}, headers={"authorization": "Basic one"})
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        assert (await endpoint.client.post("/tokenize", json={"prompt": "x"})).status_code == 401
        file.write_text("three\n")
        os.utime(file, ns=(1, 1))  # however coarse this file system's clock
        assert [await status(endpoint, "/v1/models", key) for key in ("one", "three")] == [401, 200]

    run(test, keys=Keys(file))


class Numbered(Replica):
    """Replica of the responses API: its events are numbered from the number that the gateway passes on."""

    async def generate(self, call: Call) -> None:
        self.asked.append(call.meta)
        number, context = call.meta.get("events", 0), RequestContext(resumed=tuple(call.meta["resumed"]))
        if not context.resumed:
            call.head({"status": 200, "type": "text/event-stream", "headers": {}})
        for count, word in enumerate(WORDS[len(context.resumed) :]):
            if count == self.dies_after:
                self.server.close()
                await asyncio.sleep(60)
            await asyncio.sleep(self.pause_s)
            context.unsent, context.finished = [WORDS.index(word)], word == WORDS[-1]
            both = [{"word": word, "sequence_number": number}, {"sequence_number": number + 1}]
            call.data(context.pack_event("".join(f"event: e\ndata: {json.dumps(each)}\n\n" for each in both)))
            number += 2
        if self.dies_after == len(WORDS):
            await asyncio.sleep(0.05)
            self.server.close()
            await asyncio.sleep(60)
        call.end({"prompt_tokens": 3, "queued_s": 0.0})


@pytest.mark.parametrize("dies_after", [3, len(WORDS) - 1])
def test_numbers_of_events_continue_on_another_replica(dies_after: int) -> None:
    async def test(endpoint: Endpoint) -> None:
        first = await endpoint.add(Numbered("a", dies_after=dies_after, pause_s=0.01))
        await asyncio.sleep(0.7)
        second = await endpoint.add(Numbered("b"))
        response = await endpoint.client.post("/v1/responses", json={"input": "x", "stream": True})
        events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: ")]
        assert [event["word"] for event in events[::2]] == WORDS
        assert [event["sequence_number"] for event in events] == list(range(2 * len(WORDS)))
        assert second.asked[0]["created"] == first.asked[0]["created"]

    run(test)


def test_named_events_need_no_end_mark() -> None:
    """A replica that dies after its last token has sent the last event with it."""

    async def test(endpoint: Endpoint) -> None:
        await endpoint.add(Numbered("a", dies_after=len(WORDS)))
        response = await endpoint.client.post("/v1/messages", json={"stream": True})
        assert response.text.count("event: ") == 2 * len(WORDS)
        assert "[DONE]" not in response.text and "error" not in response.text

    run(test)


def test_errors_of_anthropics_api(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("secret\n")

    async def test(endpoint: Endpoint) -> None:
        asked = {"model": "tiny", "messages": [], "max_tokens": 3}
        refused = await endpoint.client.post("/v1/messages", json=asked)
        assert refused.status_code == 401
        assert (refused.json()["type"], refused.json()["error"]["type"]) == ("error", "authentication_error")
        for wrong in ({"x-api-key": "other"}, {"x-api-key": "secret", "authorization": "Bearer other"}):
            assert (await endpoint.client.post("/v1/messages", json=asked, headers=wrong)).status_code == 401
        key = {"x-api-key": "secret"}
        missing = await endpoint.client.post("/v1/messages", json=asked | {"model": "x"}, headers=key)
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        await endpoint.add(Replica("a", dies_after=3, pause_s=0.01))
        guided = {"stream": True, "tools": [{}], "tool_choice": {"type": "any"}}
        lost = await endpoint.client.post("/v1/messages", json=asked | guided, headers=key)
        name, data = lost.text.strip().splitlines()[-2:]
        error = json.loads(data.removeprefix("data: "))
        assert name == "event: error" and error["type"] == "error" and error["error"]["type"] == "overloaded_error"
        assert "guided decoding" in error["error"]["message"]

    run(test, keys=Keys(file))


def test_failover_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(endpoint: Endpoint) -> None:
        replicas = [await endpoint.add(Replica("a", dies_after=4, pause_s=0.01))]
        await asyncio.sleep(0.7)
        replicas.append(await endpoint.add(Replica("b")))
        assert await endpoint.words() == ALL
        sent.extend(replica.asked[0]["trace"]["traceparent"].split("-")[2] for replica in replicas)

    sent: list[str] = []
    with span_collector.collecting(monkeypatch) as collected:
        run(test)
        collected.wait(lambda found: bool(found.named("POST /v1/completions")) and len(found.named("call")) == 2)
    (request,) = collected.named("POST /v1/completions")
    (event,) = request.events
    assert event.name == "failover" and attributes(event)["strata.tokens"] in (3, 4)
    first, second = sorted(collected.named("call"), key=lambda span: span.start_time_unix_nano)
    assert [first.span_id.hex(), second.span_id.hex()] == sent
    assert (first.status.code, second.status.code) == (2, 0)
    assert attributes(second)["strata.peer"] == "b" and attributes(second)["strata.resumed_tokens"] in (3, 4)
