"""Draining: a replica that is removed finishes its calls and accepts no new ones."""

import asyncio
import os
from typing import Any

from strata.serving.runtime.replicas import Presence
from strata.serving.transport.link import SECRET_BYTES, Call, Kind, Link, Server

SECRET = os.urandom(SECRET_BYTES)


class Directory:
    def __init__(self) -> None:
        self.listed: dict[str, dict[str, Any]] = {}

    async def publish(self, role: str, name: str, entry: dict[str, Any]) -> None:
        self.listed[name] = entry

    async def withdraw(self, role: str, name: str) -> None:
        del self.listed[name]


def test_draining() -> None:
    async def run() -> None:
        may_end = asyncio.Event()

        async def handle(call: Call) -> None:
            await may_end.wait()
            call.end({"done": True})

        directory: Any = Directory()
        presence = Presence(directory, "decode", "d-1", Server(handle, dict, SECRET), "127.0.0.1", "node-1")
        await presence.begin({"context": 64})
        assert directory.listed["d-1"]["context"] == 64
        link = await Link.connect(directory.listed["d-1"]["address"], SECRET, lambda _: None)
        call = link.call("completions", {})
        await asyncio.sleep(0.05)
        ending = asyncio.ensure_future(presence.end())
        await asyncio.sleep(0.3)
        assert not directory.listed and not ending.done()
        may_end.set()
        assert (await call.next())[0] == Kind.END
        await asyncio.wait_for(ending, 5)
        await asyncio.sleep(0.05)
        assert not link.alive

    asyncio.run(run())
