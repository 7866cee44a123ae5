"""The one place that looks for ports."""

import socket

from strata.platform.errors import UserError


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that just ended leaves TIME_WAIT behind
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def find_free(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def require_free(port: int, host: str, setting: str) -> None:
    if not is_free(port, host):
        raise UserError(
            f"Port {port} on {host} is in use.", f"Stop what uses it, or choose another: {setting}={find_free(host)}."
        )
