"""Requests of batches to the gateway's own application, without a connection."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from strata.serving.api.headers import REQUEST_ID
from strata.serving.gateway.app import CALLER
from strata.serving.tenants.tenant import Caller

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Answered:
    status: int
    body: bytes
    retry_after: float | None = None


async def post(app: App, path: str, body: bytes, request: str, caller: Caller | None) -> Answered:
    """Posts a request of `caller` and collects its answer. Passes admission and the tenant's limits as any other."""
    headers = [(b"content-length", str(len(body)).encode()), (REQUEST_ID.encode(), request.encode())]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers, CALLER: caller}
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    started: dict[str, Any] = {}
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        never: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        return await never  # nobody disconnects

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            parts.append(message["body"])

    await app(scope, receive, send)
    waits = next((value for name, value in started["headers"] if name == b"retry-after"), None)
    return Answered(started["status"], b"".join(parts), None if waits is None else float(waits))
