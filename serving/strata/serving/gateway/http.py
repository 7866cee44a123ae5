"""The HTTP server: uvicorn's, with limits on what it takes from a client that never gets to its request.

uvicorn waits for ever for the rest of a header and lets it grow without end; a few thousand such connections would be all
the file descriptors of a gateway.
"""

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_S = 15.0
HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 75


class GuardedProtocol(HttpToolsProtocol):
    _header_bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_header()

    def _expect_header(self) -> None:
        self._header_bytes = 0
        self._deadline = self.loop.call_later(HEADER_S, self._too_slow)

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_header()  # the next request on a connection that was kept
        if self._deadline is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._deadline is not None and self._header_bytes > HEADER_BYTES:
            self.send_400_response("The header is too large.")

    def on_headers_complete(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)


def listen(host: str, port: int) -> socket.socket:
    """With SO_REUSEPORT, so that several gateways share a port: the kernel spreads connections over those that live."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(4096)
    listener.setblocking(False)
    return listener


def server(app: Any) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=None,
    )
    return uvicorn.Server(config)
