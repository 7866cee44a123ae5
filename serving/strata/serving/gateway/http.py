"""HTTP server of the gateway: uvicorn with the bounded connections of `connection.py`."""

import functools
import resource
import socket
from typing import Any, cast

import uvicorn

from strata.serving.gateway.connection import Connection, ConnectionTable

KEEP_ALIVE_S = 75
MAX_CONNECTIONS = 2048
OTHER_FILES = 256  # descriptors that are not clients' connections
# Kernel buffer per connection and direction. The default grows to 6 MiB for a client that does not read.
SOCKET_BYTES = 256 * 2**10


def listen(host: str, port: int) -> socket.socket:
    """Listening socket with SO_REUSEPORT: gateways share a port, and the kernel spreads connections over the live ones."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Accepted connections inherit these. uvloop turns Nagle's algorithm off by itself; with asyncio's own loop the body of a
    # short answer would wait 40 ms for the acknowledgement of its header.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        listener.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BYTES)
    listener.bind((host, port))
    listener.listen(4096)
    listener.setblocking(False)
    return listener


def connection_limit() -> int:
    """Connections that fit the process's file descriptor limit, which is raised first as far as allowed."""
    wanted = MAX_CONNECTIONS + OTHER_FILES
    soft, hard = (wanted if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(MAX_CONNECTIONS, soft - OTHER_FILES))


def server(app: Any) -> uvicorn.Server:
    protocol = functools.partial(Connection, table=ConnectionTable(connection_limit()))
    config = uvicorn.Config(
        app,
        http=cast(Any, protocol),
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
