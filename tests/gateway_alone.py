"""A gateway in a process of its own, and a stand-in replica in another, for tests of the gateway's memory and descriptors.

    python gateway_alone.py replica
    python gateway_alone.py gateway '{"replica": "127.0.0.1:1234", "keys": null, "connection.STALLED_S": 1}'

Each prints the port it listens on. Values with a dot replace constants of the gateway's modules.
"""

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from strata.serving.engine.request_context import RequestContext
from strata.serving.gateway import http
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.keys import Keys
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.transport.link import SECRET_BYTES, Call, Server
from strata.serving.transport.peers import Peers

SECRET = b"x" * SECRET_BYTES
EVENT = "data: " + "x" * 1000 + "\n\n"


class Directory:
    def __init__(self, replica: str) -> None:
        self._replica = replica

    async def names(self, role: str) -> set[str]:
        return {"a"} if role == "decode" else set()

    async def entry(self, role: str, name: str) -> dict[str, Any] | None:
        return {"address": self._replica, "context": 64, "node": "here"}

    async def withdraw(self, role: str, name: str) -> None:
        pass


class Replica:
    """Streams `events` events of 1 KB each, `rate` a second, or answers with `answer` bytes without streaming."""

    def __init__(self) -> None:
        self.calls = self.cancelled = 0
        self.metas: list[dict[str, Any]] = []

    async def handle(self, call: Call) -> None:
        if call.method == "metrics":
            call.head({"status": 200, "type": "text/plain"})
            call.data(f"# TYPE stand_in_calls gauge\nstand_in_calls {self.calls}\nstand_in_cancelled {self.cancelled}\n".encode())
            call.end({})
            return
        self.calls += 1
        self.metas = [*self.metas[-9:], call.meta]
        try:
            await self._generate(call, json.loads(call.body))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.calls -= 1

    async def _generate(self, call: Call, asked: dict[str, Any]) -> None:
        if "answer" in asked or not asked.get("stream"):
            call.head({"status": 200, "type": "application/json", "headers": {}})
            call.data(b"x" * asked.get("answer", 10))
        else:
            call.head({"status": 200, "type": "text/event-stream", "headers": {}})
            began, context = time.monotonic(), RequestContext()
            for count in range(asked["events"]):
                await asyncio.sleep(0.01 if count > (time.monotonic() - began) * asked["rate"] else 0)
                context.unsent = [1]
                call.data(context.pack_event(EVENT))
            call.data(context.pack_event("data: [DONE]\n\n"))
        call.end({"prompt_tokens": 3, "tokens": 1, "queued_s": 0.0})


async def replica(stand_in: Any) -> None:
    """Serves calls by `stand_in.handle`, for good."""
    server = Server(stand_in.handle, lambda: {"calls": server.calls, "healthy": True}, SECRET)
    print((await server.listen("127.0.0.1")).rpartition(":")[2], flush=True)
    await asyncio.Event().wait()


async def gateway(settings: dict[str, Any]) -> None:
    for name in settings.keys() - {"replica", "keys"}:
        module, _, constant = name.partition(".")
        setattr(importlib.import_module(f"strata.serving.gateway.{module}"), constant, settings[name])
    directory: Any = Directory(settings["replica"])
    decode, others = Peers(directory, "decode", SECRET), Peers(directory, "gateway", SECRET)
    keys = Keys(Path(settings["keys"])) if settings.get("keys") else None
    main = Pool(("tiny",), decode, None, Admission(lambda: 200), Telemetry("tiny", "g"))
    app = App("g", Pools(main), others, keys, "here")
    await serve(app, main)


async def serve(app: App, main: Pool, port: int = 0) -> None:
    """Answers requests once the replica is found."""
    while not main.decode.all():
        await asyncio.sleep(0.05)
    listener = http.listen("127.0.0.1", port)
    print(listener.getsockname()[1], flush=True)
    await http.server(app).serve(sockets=[listener])


def run(program: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in Ray's processes
        runner.run(program)


if __name__ == "__main__":
    run(replica(Replica()) if sys.argv[1] == "replica" else gateway(json.loads(sys.argv[2])))
