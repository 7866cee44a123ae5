"""Port allocator without the race between choosing a free port and binding it.

Binding port 0 returns a port in the kernel's ephemeral range, which any outgoing connection may use before the server is up.
Ports from this allocator are below that range, are reserved among all Strata processes of the machine, and are held by a bound
socket that does not listen. A server that sets SO_REUSEADDR, as servers do, can bind a held port. Other processes cannot.
"""

import errno
import ipaddress
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from strata.platform.errors import UserError

LOOPBACK = "127.0.0.1"
FIRST = 20000  # above the ports of Ray's workers, 10002 to 19999
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
FEWEST = 1000  # with fewer ports below the ephemeral range, use that range too; its ports are held in the same way


class Reservation:
    """A port reserved until `release`, or until this process ends."""

    def __init__(self, host: str, port: int, held: list[socket.socket]) -> None:
        self.host, self.port = host, port
        self._held = held

    @property
    def url(self) -> str:
        return url(self.host, self.port)

    def release(self) -> None:
        for one in self._held:
            one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def reserve(host: str = LOOPBACK) -> Reservation:
    """Reserves a free port for a server that this process or a child will start on `host`.

    Hold it until that server has ended, so that a restarted server can bind the same port."""
    for port in _candidates():
        try:
            return _reserve("port", host, port, _bound_alone)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _unusable(error, host, port, "the host") from None
    raise UserError(f"No port is free on {host}.", "Stop servers on this machine.")


def claim(port: int, host: str, setting: str) -> Reservation:
    """Reserves a port that the user chose, until its server has ended.

    Gateways of one endpoint share a port by SO_REUSEPORT. Without the claim, two endpoints of one user could share it as well,
    and each would answer some of the other's requests."""
    require_free(port, host, setting)
    try:
        return _reserve("server", host, port, _bound_with_others)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _in_use(port, host, setting) from None
        raise _unusable(error, host, port, setting) from None


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """True if a server that sets SO_REUSEADDR could listen there now."""
    try:
        _bound(host, port, socket.SO_REUSEADDR).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise _unusable(error, host, port, "the host") from None
    return True


def require_free(port: int, host: str, setting: str) -> None:
    try:
        _bound(host, port, socket.SO_REUSEADDR).close()
    except OSError as error:
        raise (
            _in_use(port, host, setting) if error.errno == errno.EADDRINUSE else _unusable(error, host, port, setting)
        ) from None


def url(host: str, port: int) -> str:
    """Address at which a client on this machine reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "::", ""):
        host = "::1" if host == "::" else LOOPBACK
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server on `host`. For a name, all of its addresses must be loopback."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _candidates() -> Iterator[int]:
    """All ports of the range, from a random start: sequential choices would collide with other allocators."""
    first_ephemeral, last_ephemeral = (int(word) for word in EPHEMERAL.read_text().split())
    end = first_ephemeral if first_ephemeral - FIRST >= FEWEST else last_ephemeral + 1
    ports = range(min(FIRST, end - FEWEST), end)
    start = random.randrange(len(ports))
    yield from ports[start:]
    yield from ports[:start]


def _reserve(purpose: str, host: str, port: int, bound: Callable[[str, int], socket.socket]) -> Reservation:
    """Reserves the port among Strata processes and binds it. Raises OSError.

    The lock is an abstract Unix socket: unique in the network namespace, as the port is, and freed by the kernel when the
    process ends. A lock file could outlive its process or belong to another user."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0strata-{purpose}-{port}")
        return Reservation(host, port, [name, bound(host, port)])
    except BaseException:
        name.close()
        raise


def _bound_alone(host: str, port: int) -> socket.socket:
    """Fails if any socket is bound there; lets a later server with SO_REUSEADDR bind."""
    bound = _bound(host, port)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bound


def _bound_with_others(host: str, port: int) -> socket.socket:
    return _bound(host, port, socket.SO_REUSEADDR, socket.SO_REUSEPORT)


def _bound(host: str, port: int, *options: int) -> socket.socket:
    """With SO_REUSEADDR, neither TIME_WAIT connections of a server that just ended nor sockets that are bound with it and do
    not listen prevent the bind."""
    bound = socket.socket(family_of(host))
    try:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def _in_use(port: int, host: str, setting: str) -> UserError:
    with reserve(host) as other:
        return UserError(f"Port {port} on {host} is in use.", f"Stop what uses it, or choose another: {setting}={other.port}.")


def _unusable(error: OSError, host: str, port: int, setting: str) -> UserError:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return UserError(
            f"'{host}' is not an address of this machine.", "Listen on 127.0.0.1 or on another address of this machine."
        )
    return UserError(
        f"Port {port} on {host} cannot be used: {error.strerror or error}.", f"Choose a port of 1024 or more: {setting}."
    )
