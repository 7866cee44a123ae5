"""The gateway's HTTP server: uvicorn's, with `connection.py` for each connection."""

import functools
import resource
import socket
from typing import Any, cast

import uvicorn

from strata.serving.gateway.connection import Connection, ConnectionTable

KEEP_ALIVE_S = 75
MAX_CONNECTIONS = 2048
OTHER_FILES = 256  # descriptors that are not clients' connections
# In the kernel, for each connection and direction. Without a limit it takes up to 6 MiB for a client that does not read.
SOCKET_BYTES = 256 * 2**10


def listen(host: str, port: int) -> socket.socket:
    """With SO_REUSEPORT, so that several gateways share a port: the kernel spreads connections over those that live."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # accepted connections inherit them
        listener.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BYTES)
    listener.bind((host, port))
    listener.listen(4096)
    listener.setblocking(False)
    return listener


def connection_limit() -> int:
    """Within what this process may open, after raising that as far as it is allowed to."""
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
