"""A gateway with files and batches in a process of its own, and a stand-in engine in another.

    python gateway_with_batches.py engine '{}'
    python gateway_with_batches.py gateway '{"replica": "127.0.0.1:1234", "folder": "/tmp/x", "keys": null, "port": 0}'

Each prints the port it listens on. The engine answers with the prompt in capitals, and counts how often it saw each prompt.
"""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

from strata.platform import recipe_file
from strata.serving.gateway import http
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.keys import Keys
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.runtime import batching
from strata.serving.spec import GatewaySpec, Network
from strata.serving.tenants.gate import Gate
from strata.serving.transport.link import SECRET_BYTES, Call, Server
from strata.serving.transport.peers import Peers

SECRET = b"x" * SECRET_BYTES


class Engine:
    """Answers after the `seconds` of a request's body, with the statuses of its `fail` first."""

    def __init__(self) -> None:
        self.seen = Counter[str]()
        self.running = self.most = 0

    async def handle(self, call: Call) -> None:
        asked = json.loads(call.body)
        if call.method == "tokenize":  # how a test reads the counters
            self._answer(call, 200, {"seen": self.seen, "most": self.most})
            self.most = self.running
            return
        prompt = asked["prompt"]
        self.seen[prompt] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(asked.get("seconds", 0))
        finally:
            self.running -= 1
        statuses = asked.get("fail", [])
        if self.seen[prompt] <= len(statuses):
            self._answer(call, statuses[self.seen[prompt] - 1], {"error": {"message": "failed as wanted"}})
        else:
            self._answer(call, 200, {"object": "text_completion", "choices": [{"text": prompt.upper()}]})

    def _answer(self, call: Call, status: int, tree: Any) -> None:
        call.head({"status": status, "type": "application/json", "headers": {}})
        call.data(json.dumps(tree).encode())
        call.end({"prompt_tokens": 3, "tokens": 1, "queued_s": 0.0})


class Directory:
    def __init__(self, replica: str) -> None:
        self._replica = replica

    async def names(self, role: str) -> set[str]:
        return {"a"} if role == "decode" else set()

    async def entry(self, role: str, name: str) -> dict[str, Any] | None:
        return {"address": self._replica, "context": 64, "node": "here"}

    async def withdraw(self, role: str, name: str) -> None:
        pass


async def engine() -> None:
    stand_in = Engine()
    server = Server(stand_in.handle, lambda: {"calls": server.calls, "healthy": True}, SECRET)
    print((await server.listen("127.0.0.1")).rpartition(":")[2], flush=True)
    await asyncio.Event().wait()


async def gateway(settings: dict[str, Any]) -> None:
    words = [f"serve.files.folder={settings['folder']}", "serve.max_sequences=8", *settings.get("words", [])]
    spec = GatewaySpec.of(recipe_file.load("laptop", words).serve, "tiny", Network("127.0.0.1", SECRET))
    directory: Any = Directory(settings["replica"])
    decode, others = Peers(directory, "decode", SECRET), Peers(directory, "gateway", SECRET)
    keys = Keys(Path(settings["keys"])) if settings.get("keys") else None
    gate = Gate(lambda: 8, 16, SECRET, keys.lend_idle) if keys is not None else None
    telemetry, api = Telemetry("tiny", "g"), batching.api(spec)
    app = App("g", ("tiny",), decode, None, others, Admission(lambda: 24), telemetry, keys, "here", gate=gate, batches=api)
    batches = batching.executor(spec, app, keys, decode, others, "g")
    assert batches is not None
    while not decode.all():
        await asyncio.sleep(0.05)
    listener = http.listen("127.0.0.1", settings.get("port", 0))
    batches.start()
    print(listener.getsockname()[1], flush=True)
    await http.server(app).serve(sockets=[listener])
    await batches.stop()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        chosen, given = sys.argv[1], json.loads(sys.argv[2])
        runner.run(engine() if chosen == "engine" else gateway(given))
