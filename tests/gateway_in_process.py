"""A gateway and the stand-in replica of `gateway_alone.py` in the process of the test, which can then change their limits."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from gateway_alone import SECRET, Directory, Replica

from strata.serving.gateway import http
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.transport.link import Server
from strata.serving.transport.peers import Peers

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Gateway:
    port: int
    replica: Replica
    server: uvicorn.Server
    serving: asyncio.Task[None]
    client: httpx.AsyncClient

    async def connect(self, data: bytes = b"", unread_bytes: int = 65536) -> Connection:
        """Opens a plain connection. At most about `unread_bytes` are received before the test reads."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=unread_bytes)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "x"} | body)

    async def metric(self, name: str) -> float:
        lines = (await self.client.get("/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@asynccontextmanager
async def running(capacity: int = 200, name: str = "g", port: int = 0, **more: Any) -> AsyncIterator[Gateway]:
    """`more`: further arguments of the gateway's App."""
    async with AsyncExitStack() as stack:
        replica = Replica()
        link = Server(replica.handle, lambda: {"calls": link.calls, "healthy": True}, SECRET)
        directory: Any = Directory(await link.listen("127.0.0.1"))
        stack.callback(link.close)
        decode, others = Peers(directory, "decode", SECRET), Peers(directory, "gateway", SECRET)
        models = more.pop("models", ("tiny",))
        main = Pool(models, decode, None, Admission(lambda: capacity), Telemetry("tiny", name))
        app = App(name, Pools(main), others, **more)
        listener = http.listen("127.0.0.1", port)
        port, server = listener.getsockname()[1], http.server(app)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20))
        while not (server.started and decode.all()):
            await asyncio.sleep(0.01)
        yield Gateway(port, replica, server, serving, client)
        await client.aclose()
        server.should_exit = True
        await serving


def run(test: Callable[[Gateway], Awaitable[None]], capacity: int = 200) -> None:
    async def inside() -> None:
        async with running(capacity) as gateway:
            await asyncio.wait_for(test(gateway), 30)

    asyncio.run(inside())


async def until(done: Callable[[], bool], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not done():
            await asyncio.sleep(0.01)


def post(body: Any, path: str = "/v1/completions", length: int | None = None) -> bytes:
    """A request, or its beginning if `length` is larger than the body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), length or len(data), data)
