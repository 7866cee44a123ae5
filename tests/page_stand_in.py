"""An endpoint for tests of the page: the real gateway in a thread, and stand-in replicas that answer as a script says.

The last message of a request names its script, and a script can wait for the test, so that no test depends on timing.
"""

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from strata.serving.engine.request_context import RequestContext
from strata.serving.gateway import http, routes
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.keys import Keys
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.transport.link import SECRET_BYTES, Call, Server
from strata.serving.transport.peers import Peers

SECRET = b"p" * SECRET_BYTES
ENGINE = "5ed2179d-0000"
EXPLAINED = {
    "prefill": {"where": "remote", "reason": "long", "engine": ENGINE, "seconds": 0.042},
    "prompt_tokens": 700,
    "cached_tokens": {"decode": 128, "prefill": 512},
    "moved_tokens": 572,
    "moved_bytes": 3 * 2**20,
}
PREFILL = {"x-strata-prefill": f"remote; engine={ENGINE}"}


@dataclass
class Script:
    """Answer to a message. At part `waits_at` the replica waits until the test calls `go`; a replica dies before part
    `dies_at`, unless it continues another's stream; `cut` ends the connection without the end of the stream."""

    parts: list[str] = field(default_factory=lambda: ["Hello", " there", "!"])
    reasoning: str = ""
    waits_at: int | None = None
    dies_at: int | None = None
    error: str = ""
    status: int = 200
    cut: bool = False
    finish: str = "stop"
    pause_s: float = 0.002
    go: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)


class Replica:
    def __init__(self, endpoint: "Endpoint", name: str) -> None:
        self.endpoint, self.name = endpoint, name
        self.healthy = True
        self.server = Server(self.handle, self.load, SECRET)

    def load(self) -> dict[str, Any]:
        shown = {"running": self.server.calls, "waiting": 2, "kv_usage": 0.25}
        return {"calls": self.server.calls, "healthy": self.healthy} | shown

    async def handle(self, call: Call) -> None:
        tree = json.loads(call.body)
        self.endpoint.asked.append(tree | {"replica": self.name})
        message = tree["prompt"] if call.method == "images" else tree["messages"][-1]["content"]
        script = self.endpoint.scripts.get(message, Script())
        try:
            if script.status != 200:
                call.head({"status": script.status, "type": "application/json", "headers": {"retry-after": "7"}})
                call.data(json.dumps({"error": {"message": script.error}}).encode())
                call.end({})
            elif call.method == "images":
                await self._draw(call, tree, script)
            else:
                await self._chat(call, tree, script)
        except asyncio.CancelledError:
            script.cancelled.set()
            raise

    async def _wait(self, script: Script, at: int) -> None:
        if script.waits_at == at:
            while not script.go.is_set():
                await asyncio.sleep(0.005)
        await asyncio.sleep(script.pause_s)

    async def _chat(self, call: Call, tree: dict[str, Any], script: Script) -> None:
        context = RequestContext(resumed=tuple(call.meta["resumed"]))
        trailer: dict[str, Any] = {"prompt_tokens": 700, "queued_s": 0.0125}
        if call.meta["explain"]:
            trailer["explained"] = EXPLAINED
        if not tree.get("stream"):
            call.head({"status": 200, "type": "application/json", "headers": PREFILL})
            call.data(json.dumps({"text": "".join(script.parts)}).encode())
            call.end(trailer | {"tokens": len(script.parts)})
            return
        if not context.resumed:
            call.head({"status": 200, "type": "text/event-stream", "headers": PREFILL})
            call.data(context.pack_event(chunk({"role": "assistant", "content": ""})))
        if script.reasoning:
            call.data(context.pack_event(chunk({"reasoning_content": script.reasoning})))
        for at, part in list(enumerate(script.parts))[len(context.resumed) :]:
            await self._wait(script, at)
            if script.dies_at == at and not context.resumed:
                await asyncio.sleep(0.05)  # its last parts are sent
                self.server.close()
                await asyncio.sleep(60)
            context.unsent = [at]
            call.data(context.pack_event(chunk({"content": part})))
        if script.error:
            call.data(context.pack_event(f"data: {json.dumps({'error': {'message': script.error}})}\n\n"))
        if script.cut:
            call.end(trailer)
            return
        context.finished = True
        usage = {"prompt_tokens": 700, "completion_tokens": len(script.parts), "total_tokens": 700 + len(script.parts)}
        call.data(context.pack_event(chunk({}, script.finish)))
        call.data(context.pack_event(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"))
        call.data(context.pack_event("data: [DONE]\n\n"))
        call.end(trailer)

    async def _draw(self, call: Call, tree: dict[str, Any], script: Script) -> None:
        call.head({"status": 200, "type": "text/event-stream", "headers": {}})
        for step in range(1, 5):
            await self._wait(script, step)
            for index in range(tree["n"]):
                call.data(event({"type": "image_generation.progress", "index": index, "step": step, "steps": 4}))
                if step == 2:
                    call.data(event({"type": "image_generation.partial_image", "index": index, "b64_json": picture(90)}))
        if script.error:
            call.data(event({"error": {"message": script.error}}))
        else:
            for index in range(tree["n"]):
                seed = {"index": index, "seed": 7 + index, "b64_json": picture(200)}
                call.data(event({"type": "image_generation.completed"} | seed, [index]))
        call.end({"queued_s": 0.003})


def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}\n\n"


def event(tree: dict[str, Any], tokens: list[int] | None = None) -> bytes:
    return RequestContext(unsent=tokens or []).pack_event(f"data: {json.dumps(tree)}\n\n")


def picture(shade: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (24, 16), (shade, 40, 60)).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


class Directory:
    def __init__(self) -> None:
        self.entries: dict[str, dict[str, str]] = {}

    async def names(self, role: str) -> set[str]:
        return set(self.entries.get(role, ()))

    async def entry(self, role: str, name: str) -> dict[str, Any] | None:
        return {"address": self.entries[role][name], "context": 4096, "node": "here"}

    async def withdraw(self, role: str, name: str) -> None:
        self.entries[role].pop(name, None)


@dataclass
class Endpoint:
    client: httpx.Client
    url: str = ""
    scripts: dict[str, Script] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def endpoint(
    models: tuple[str, ...] = ("tiny", "tuned"), replicas: int = 1, keys: Path | None = None, pictures: bool = False
) -> Iterator[Endpoint]:
    made = Endpoint(httpx.Client(timeout=20, verify=False))
    started, stopped = threading.Event(), threading.Event()

    async def serve() -> None:
        directory: Any = Directory()
        role = "pictures" if pictures else "decode"
        members = [Replica(made, f"{role}-{number}") for number in range(replicas)]
        prefiller = Replica(made, "prefill-0")
        directory.entries = {
            role: {one.name: await one.server.listen("127.0.0.1") for one in members},
            "prefill": {} if pictures else {"prefill-0": await prefiller.server.listen("127.0.0.1")},
        }
        pool, others = Peers(directory, role, SECRET, 0.01), Peers(directory, "gateway", SECRET)
        prefill = None if pictures else Peers(directory, "prefill", SECRET, 0.01)
        kind = routes.PICTURES if pictures else routes.TEXT
        known = Keys(keys) if keys is not None else None
        main = Pool(models, pool, prefill, Admission(lambda: 50), Telemetry("tiny", "g"))
        app = App("g", Pools(main), others, known, "here", routes=kind)
        listener = http.listen("127.0.0.1", 0)
        made.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = http.server(app)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        peers = [pool] if prefill is None else [pool, prefill]
        while not (server.started and all(one.all() and all(peer.healthy for peer in one.all()) for one in peers)):
            await asyncio.sleep(0.005)
        started.set()
        await asyncio.to_thread(stopped.wait)
        for one in (*members, prefiller):
            one.server.close()
        server.should_exit = server.force_exit = True
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(20), "the endpoint did not start"
    made.client.base_url = httpx.URL(made.url)
    try:
        yield made
    finally:
        made.client.close()
        stopped.set()
        thread.join(20)
